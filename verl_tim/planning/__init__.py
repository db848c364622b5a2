"""What a run will hold on each GPU and how long it will take, before anything is started.

Read in this order: `shape` (a model as counts), `gpu` (the table of GPUs), `rates` (every speed, with its source, from
rates.yaml), `settings` (the keys of a config that matter), `lengths` (how long answers are assumed to be);
then memory: `item` and `phase`, `trainer_memory`, `rollout_memory`, `phases`; time: `decode`, `rollout_time`,
`trainer_time`, `network`, `sync_time`, `step_time`; then `plan` (all of it), `remedy` (what makes a plan fit),
`anchors` (predictions beside measurements) and `scaling` (the forecast of docs/scaling.md).

Nothing here imports verl: a config comes composed. Nothing is measured here either; a number is computed from the
config, from the model's shape, or from rates.yaml.
"""
