"""The parts of check_gpu.py.

- `llama2c`: a llama2.c checkpoint and its tokenizer, as transformers knows them
- `models`: the models and texts that are checked on
- `record`: what was found, what was left out, and the time that is left
- `checks`: training, equality, sampling, devices
- `timings`: how long it all takes
- `report`: the record as Markdown and JSON
"""
