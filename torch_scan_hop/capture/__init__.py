"""From Python to one body graph: Dynamo captures a call, guarded, and eager mode replays it."""
