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

import os as _os

# On a CPU torch keeps a compiled product for each shape it has met, 1,024 of them in either of two caches. A step's
# shapes hardly ever come back, so that memory grew by 80 MB a step, to gigabytes. Read at the first product.
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    _os.environ.setdefault(_name, "16")
