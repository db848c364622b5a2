"""Files that start a run on a cluster: one module per scheduler, each a pure function from a `Job` to text.

`job` is what they share (words, nodes, environment), `lint` checks what they made with the scheduler's own tools,
`submit` hands it over.
"""
