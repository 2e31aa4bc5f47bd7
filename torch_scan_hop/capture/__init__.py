"""Make one body graph of Python: Dynamo captures a call, guarded, and eager mode replays it.

Eager mode, without Dynamo until the first call:

``replay``          the capture of a call, kept for its body and found again
``reasons``         why a body was not traced: in a line, and remembered
``user_code``       which function, line and frame is the user's

What traced code calls, and Dynamo's trackers of it:

``registration``    tells Dynamo about the trackers, when this package is imported
``variables``       the trackers: a call of scan becomes a node of the graph being captured
``traced_operators``  what traced code asks of a tracker: of numbers, whose dtypes
                    ``number_dtypes`` finds, of refusals, of what is written to
``refusals``        errors that a person reads

Changes to the graph of a step:

``purify``          makes what it changes in place a carry; ``shared_memory`` finds exceptions
``indexing``        ``x[t]`` without asking for the value of ``t``; ``index_nodes``: nodes of that
``cache_key``       its part of the keys of torch's own caches
"""
