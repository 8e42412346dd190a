"""The parts of check_vllm.py.

- `answers`: the same prompts to vLLM and to headstart
- `ask_vllm`: the process that vLLM runs in
- `verdict`: what differs, and a table
"""
