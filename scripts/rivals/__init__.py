"""Other decoders, as functions that `headstart bench --peer module:function` takes (docs/peers.md).

- `compiled`: transformers' own `generate` with a static cache and torch.compile
- `economized`: economize's lookup, EAGLE-3 and Medusa
"""
