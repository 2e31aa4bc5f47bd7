"""Find out if two modules compute the same function of their parameters and buffers.

``modules`` walks two modules side by side, ``values`` compares their attributes. What cannot be
shown to be equal is different.
"""
