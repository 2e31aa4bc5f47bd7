"""Dynamo (checked on torch 2.9.1, 2.13.0, 2.15.0). ``loading`` alone may be imported without it."""
