"""The exactness gate of `verl-tim verify`: scenarios that hold a rollout engine against verl's trainer.

`subject` makes the two sides, `scenarios` runs them against each other, `faults` plants errors that the gate must
catch, and `cause` names where two forwards part. `ladder` asks one claim after another, `layers` lays two forwards side
by side (`forward`, `hf_taps`, `engine_dump`, `vllm_engine`: the sides), `probe` measures one checkpoint.
`ops` are the operations at a model's shapes.
"""
