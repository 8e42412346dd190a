"""The card of a head: what it is, how it is run, and what was measured, for its folder and for the Hub.

Nothing is written that the head's files, its recipe or a bench report do not say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

PAPERS = {
    "medusa": "Medusa heads: one residual block a depth on the last hidden state (Cai et al., arXiv 2401.10774)",
    "hydra": "Hydra heads: Medusa heads that read the tokens drafted before (Ankner et al., arXiv 2402.05109)",
    "eagle1": "An EAGLE head: one decoder layer that continues hidden states (Li et al., arXiv 2401.15077)",
    "eagle3": "An EAGLE-3 head: one decoder layer over hidden states of three depths (Li et al., arXiv 2503.01840)",
    "mlp_speculator": "An MLP speculator (Wertheimer et al., arXiv 2404.19124)",
}
_PROMPT = "Why is the sky blue?"


@dataclass(kw_only=True)
class Card:
    """What a card says of a head."""

    method: str
    config: Mapping[str, Any]
    """Fields of the method's config."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    repo: str = ""
    """Where it is to be found: user/name, perhaps with @revision; empty for a folder."""
    base_model: str = ""
    """The backbone's Hub id; without one, the backbone's name if that is one."""
    license: str = ""
    recipe: str = ""
    """The recipe of its run, as YAML."""
    door: bool = False
    """Whether `custom_generate/generate.py` lies beside it."""
    serving: Mapping[str, str] = field(default_factory=dict)
    """By engine, how it serves the head or why it does not, as Markdown."""
    results: list[dict[str, Any]] = field(default_factory=list)
    """As in a model index."""
    measured: str = ""
    """The same for readers, as Markdown."""

    @property
    def base(self) -> str:
        """What the backbone is called."""
        return self.base_model or self.config["backbone"] or "its backbone"

    def __str__(self) -> str:
        return "\n".join([*self._head(), *self._run(), *self._served(), *self._told(), *self._tables()])

    def _head(self) -> Iterator[str]:
        facts: dict[str, Any] = {"library_name": "headstart", "pipeline_tag": "text-generation"}
        if self.base.count("/") == 1:
            facts["base_model"] = self.base
        if self.license:
            facts["license"] = self.license
        facts["tags"] = ["speculative-decoding", self.method, *(["custom_generate"] if self.door else [])]
        if self.results:
            facts["model-index"] = [{"name": self.repo.partition("@")[0].split("/")[-1], "results": self.results}]
        yield from ("---", yaml.safe_dump(facts, sort_keys=False, allow_unicode=True).rstrip(), "---", "")
        yield from (f"# {self.method} head for {self.base}", "")
        yield from ("Proposes tokens that the backbone verifies; what is generated is the backbone's own text.", "")
        if self.changed:
            yield from (
                "**The backbone is a changed one:** with `adapter=True` the LoRA beside this head is taken into it,",
                "and what is generated is the text of that model, not of the original.",
                "",
            )

    @property
    def changed(self) -> bool:
        """Whether the head belongs to a backbone with an adapter."""
        return bool(self.config.get("adapter_hash"))

    def _run(self) -> Iterator[str]:
        place, more = self.repo or "THIS FOLDER", ", adapter=True" if self.changed else ""
        yield from ("## Run it", "", "```python", "import headstart as hs  # pip install headstart", "")
        yield from (f'backbone = hs.load_backbone("{self.base}")', f'head = hs.load_head("{place}", backbone{more})')
        yield from (f'print(hs.Generator(backbone, head).generate("{_PROMPT}").text)', "```", "")
        if not self.door:
            return
        yield from ("In transformers, with headstart installed:", "", "```python")
        if self.base.count("/") == 1:
            yield from ("from transformers import AutoModelForCausalLM, AutoTokenizer", "")
            yield f'model = AutoModelForCausalLM.from_pretrained("{self.base}")'
            yield f'tokenizer = AutoTokenizer.from_pretrained("{self.base}")'
        else:  # no name that transformers knows
            yield "model, tokenizer = backbone.model, backbone.tokenizer"
        yield from (f'inputs = tokenizer("{_PROMPT}", return_tensors="pt")',)
        name = self.repo.partition("@")[0] or "THIS FOLDER"
        yield f'output = model.generate(**inputs, max_new_tokens=64, custom_generate="{name}", trust_remote_code=True)'
        yield from ("print(tokenizer.decode(output[0], skip_special_tokens=True))", "```", "")

    def _served(self) -> Iterator[str]:
        for engine, words in self.serving.items():
            yield from (f"## In {engine}", "", words, "")

    def _told(self) -> Iterator[str]:
        if self.measured:
            yield from ("## Results", "", self.measured, "")
        if self.repo:
            yield from ("## Method", "", f"{PAPERS.get(self.method, self.method)}.", "")
            data = self.provenance.get("data") or []
            yield from ("## Data", "", ", ".join(f"`{name}`" for name in data) or "Its files do not say.", "")
            yield from ("## Licence", "", self.license or "Not stated by who pushed it.", "")
        if self.recipe:
            yield from ("## Recipe", "", "```yaml", self.recipe.rstrip(), "```", "")

    def _tables(self) -> Iterator[str]:
        for title, block in (("Config", self.config), ("Training", self.provenance), ("Versions", self.versions)):
            if block:
                yield from (f"## {title}", "", "| | |", "|---|---|")
                yield from (f"| {key} | {_cell(value)} |" for key, value in block.items())
                yield ""


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
