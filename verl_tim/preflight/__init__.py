"""What `verl-tim preflight` does: looks at every node of a Ray cluster before a run starts there.

`facts` is one node's facts, by a plain function; `judge` compares those of all nodes, and knows no Ray; `collective`
and `contract` are the two trials; `cluster` runs all of it on the nodes, with a time limit on every call.
"""
