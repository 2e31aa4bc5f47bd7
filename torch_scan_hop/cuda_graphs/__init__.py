"""A loop on a GPU as replays of a CUDA graph, which holds a block of its steps.

``capturable``  finds the bodies that may be captured
``graphed``     a loop that is captured, and replayed for any number of steps
``recording``   one capture: the memory that it reads and writes, and a call that replays it
``devices``     captures graphs, by type of device
"""
