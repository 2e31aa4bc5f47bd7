"""From Python to one body graph: Dynamo captures a call, guarded, and eager mode replays it.

Eager mode, without Dynamo until the first call:

``replay``          the capture of a call, kept for its body and found again
``reasons``         why a body was not traced: in a line, and remembered
``user_code``       which function, line and frame is the user's

What traced code calls, and Dynamo's trackers of it:

``registration``    all that importing this package tells Dynamo
``variables``       the trackers: a call of scan becomes a node of the graph being captured
``numbers``         a scan that begins with Python numbers; ``number_dtypes`` finds their dtypes
``refusals``        errors that a person reads

What becomes of the graph of a step:

``purify``          what it changes in place becomes a carry; ``shared_memory`` says what cannot
``indexing``        what ``x[t]`` means without asking for the value of ``t``; ``index_nodes`` of it
``cache_key``       what torch's own caches are to know of it
"""
