"""Training: a head learns on a frozen backbone, from one CPU to many processes.

- `recipe`: the settings of a run
- `batches`: rows to batches, in an order that a step number determines
- `losses`, `summed`: losses that know no head, and their sum in chunks
- `objective`: a head and its loss as one module
- `schedule`: where a run stands, and the learning rate there
- `setup`: everything that a recipe names, loaded
- `loop`: the loop itself, `train`
- `checkpoints`: states that appear whole, rotate and resume
- `log`: metrics.jsonl, trackers, the status line
- `trouble`: steps that go wrong, told with row and tensor
- `evaluate`: accuracy by depth, estimated and measured acceptance length
- `sheet`: one step and a run sheet
"""
