"""Backbones in other forms: quantised, with adapters, offloaded, with attention that takes no mask of a tree."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload, dispatch_model
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import zoo
from headstart import Backbone, Generator, UserError, load_backbone, load_head
from headstart.heads.format import save_head
from headstart.heads.forms import matrix_of, weights_hash
from headstart.heads.methods import METHODS
from headstart.options import BackboneOptions, backbone_of

PROMPT = torch.tensor([[5, 6, 7, 8, 9, 10, 7, 8]])
NEW = 14


def own(model: Any) -> list[int]:
    """What the model's own generate says."""
    with torch.no_grad():
        found = model.generate(
            input_ids=PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=2,
        )
    return found[0, PROMPT.shape[1] :].tolist()


def ours(backbone: Backbone, drafter: Any, **options: Any) -> list[int]:
    return Generator(backbone, drafter, **options).generate(PROMPT, max_new_tokens=NEW, do_sample=False).tokens


def check_all(backbone: Backbone, expected: list[int], methods: Iterable[str] = ("eagle3",)) -> None:
    """Lookup, plain decoding and heads, in chains and trees."""
    for drafter in (None, "ngram"):
        assert ours(backbone, drafter) == expected
    for method in methods:
        head = METHODS[method].build(backbone)
        for tree in ("chain:2", "dynamic:2x3x6"):
            assert ours(backbone, head, tree=tree) == expected, (method, tree)


# -- attention without masks -------------------------------------------------------------------------------------------


def without_mask(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any
) -> tuple[Tensor, None]:
    """What flash attention does: causal, from the right, and no other mask."""
    assert attention_mask is None, "this attention takes no mask"
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
    width, length = query.shape[2], key.shape[2]
    seen = torch.ones(width, length, dtype=torch.bool).tril(length - width)
    mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=more["scaling"])
    return mixed.transpose(1, 2).contiguous(), None


@pytest.fixture(params=["known", "unknown"])
def maskless(request: pytest.FixtureRequest) -> Iterator[str]:
    """A registered attention that takes no masks, known to transformers' makers of masks or not."""
    name = f"maskless_{request.param}"
    AttentionInterface.register(name, without_mask)
    if request.param == "known":
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    yield name
    AttentionInterface._global_mapping.pop(name)
    AttentionMaskInterface._global_mapping.pop(name, None)


def test_attention_that_takes_no_masks_is_switched_for_verification(maskless: str) -> None:
    model = zoo.model(attention=maskless)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        backbone = Backbone(model, zoo.tokenizer())
        check_all(backbone, own(zoo.model()))
    (note,) = {str(one.message) for one in told}
    assert f"{maskless} takes no mask of a tree: what is drafted is verified with sdpa" in note
    assert len(told) == 1, "said once"
    assert own(model) == own(zoo.model()), "the model is as it was"
    assert model.config._attn_implementation == maskless
    with torch.no_grad():  # whole texts keep it
        torch.testing.assert_close(backbone.forward(PROMPT).last, zoo.backbone().forward(PROMPT).last)


def test_it_is_itself_again_after_an_error(maskless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backbone = Backbone(zoo.model(attention=maskless), zoo.tokenizer())

    def broken(*arguments: Any, **more: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(backbone.layers[1], "forward", broken)
    with pytest.raises(RuntimeError, match="broken"):
        backbone.forward(PROMPT, cache=backbone.new_cache())
    assert backbone.config._attn_implementation == maskless


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
def test_the_kernels_of_gpus_are_among_them(name: str) -> None:
    model = zoo.model()
    model.config._attn_implementation = name
    with pytest.warns(UserWarning, match=f"{name} takes no mask"):
        backbone = Backbone(model, zoo.tokenizer())
    with torch.no_grad():
        backbone.forward(PROMPT, cache=backbone.new_cache())  # whose kernels are not here


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_nothing_is_said_of_those_that_take_masks(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Backbone(zoo.model(attention=name), zoo.tokenizer())


def test_layers_that_are_built_for_flash_attention_are_refused() -> None:
    model = zoo.model()

    class TinyFlashAttention2(type(model.model.layers[0].self_attn)):
        pass

    model.model.layers[0].self_attn.__class__ = TinyFlashAttention2
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match='TinyFlashAttention2.*attention="sdpa"'):
        Backbone(model)


# -- adapters ----------------------------------------------------------------------------------------------------------


def adapted(seed: int = 1, **changes: Any) -> Any:
    peft = pytest.importorskip("peft")
    fields = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False, **changes}
    model = zoo.model()
    torch.manual_seed(seed)
    return peft.get_peft_model(model, peft.LoraConfig(**fields), adapter_name=f"style{seed}").eval()


@pytest.mark.parametrize("kind", ["bare", "CAUSAL_LM"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_active_adapter_is_part_of_the_backbone(kind: str) -> None:
    model = adapted(task_type=None if kind == "bare" else kind)
    expected = own(model)
    assert expected != own(zoo.model())
    backbone = Backbone(model, zoo.tokenizer())
    check_all(backbone, expected, METHODS)
    assert backbone.name.endswith(" + adapter style1")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_output_projection_may_be_adapted() -> None:
    model = adapted(target_modules=["lm_head", "q_proj"])
    check_all(Backbone(model, zoo.tokenizer()), own(model))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_fingerprint_is_that_of_what_is_active() -> None:
    plain, model = zoo.backbone().fingerprint(), adapted()
    backbone = Backbone(model, zoo.tokenizer())
    with_adapter = backbone.fingerprint()
    assert with_adapter != plain
    assert Backbone(adapted(seed=2)).fingerprint() not in (plain, with_adapter)
    with model.disable_adapter():
        assert backbone.fingerprint() == plain
    peft = pytest.importorskip("peft")
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    assert backbone.fingerprint() == with_adapter, "one that is not active counts for nothing"
    model.set_adapter("other")
    assert backbone.fingerprint() not in (plain, with_adapter)
    model.set_adapter("style1")
    assert backbone.fingerprint() == with_adapter


def test_adapters_that_transformers_puts_in_count_as_well() -> None:
    peft = pytest.importorskip("peft")
    model = zoo.model()
    torch.manual_seed(1)
    try:
        model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False), "inside")
    except ValueError as error:  # transformers asks for a newer peft
        pytest.skip(str(error))
    backbone = Backbone(model.eval(), zoo.tokenizer())
    assert backbone.fingerprint() != zoo.backbone().fingerprint()
    check_all(backbone, own(model))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_tokens_of_an_adapters_own_are_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(UserError, match="prompt tuning: puts tokens of its own"):
        Backbone(peft.get_peft_model(zoo.model(), config))


# -- a head and what it was trained on ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_head_of_other_weights_or_adapters_is_told_once_with_both_hashes(tmp_path: Path) -> None:
    trained_on, other = zoo.backbone(), zoo.backbone(seed=1)
    folder = save_head(METHODS["medusa"].build(trained_on), tmp_path / "head")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        head = load_head(folder, other)
        Generator(other, head)
        Generator(other, head, tree="chain:2").generate(PROMPT, max_new_tokens=3)
    (note,) = [str(one.message) for one in told]
    assert f"the medusa head was trained on weights {trained_on.fingerprint()}" in note
    assert other.fingerprint() in note
    changed = Backbone(adapted(), zoo.tokenizer())
    with pytest.warns(UserWarning, match=f"{changed.name} has {changed.fingerprint()}".replace("+", r"\+")):
        load_head(folder, changed)


def test_a_head_of_another_template_is_told_with_both_hashes(tmp_path: Path) -> None:
    import copy

    from headstart.heads import chat

    backbone, tokenizer = zoo.backbone(), copy.deepcopy(zoo.tokenizer())
    folder = save_head(METHODS["medusa"].build(backbone), tmp_path / "head")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    hashes = [chat.fingerprint(one)["template"] for one in (backbone.tokenizer, tokenizer)]
    with pytest.warns(UserWarning, match=f"chat template {hashes[0]}.*{hashes[1]}"):
        load_head(folder, Backbone(zoo.model(), tokenizer))


def test_nothing_is_said_where_it_belongs(tmp_path: Path) -> None:
    folder = save_head(METHODS["medusa"].build(zoo.backbone()), tmp_path / "head")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backbone = Backbone(zoo.model().to(torch.bfloat16), zoo.tokenizer())
        Generator(backbone, load_head(folder, backbone))


F32, B16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("stored", "trained", "loaded"),
    [(F32, F32, F16), (F32, F16, F32), (B16, B16, F16), (B16, F16, B16), (F16, F32, F16)],
)
def test_a_precision_alone_is_no_difference(
    stored: torch.dtype, trained: torch.dtype, loaded: torch.dtype, tmp_path: Path
) -> None:
    first, second = (
        Backbone(zoo.model(initializer_range=1e-3).to(stored).to(one), zoo.tokenizer()) for one in (trained, loaded)
    )
    folder = save_head(METHODS["medusa"].build(first), tmp_path / "head")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_head(folder, second)


@pytest.mark.parametrize("stored", [F32, B16, F16], ids=str)
def test_other_weights_are_told_in_the_precision_they_are_stored_in(stored: torch.dtype, tmp_path: Path) -> None:
    head = save_head(METHODS["medusa"].build(Backbone(zoo.model().to(stored), zoo.tokenizer())), tmp_path / "head")
    for seed, name in enumerate(("right", "other")):
        zoo.model(seed=seed).to(stored).save_pretrained(tmp_path / name)
        zoo.tokenizer().save_pretrained(tmp_path / name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_head(head, load_backbone(str(tmp_path / "right")))
    with pytest.warns(UserWarning, match="was trained on weights"):
        load_head(head, load_backbone(str(tmp_path / "other")))


# -- weights elsewhere -------------------------------------------------------------------------------------------------


def spread(model: Any, folder: Path) -> Any:
    places = {f"model.layers.{k}": "disk" if k % 2 else "cpu" for k in range(4)}
    places |= {"model.embed_tokens": "cpu", "model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "disk"}
    return dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


SPREAD: dict[str, Callable[[Any, Path], Any]] = {
    "cpu": lambda model, folder: cpu_offload(model, execution_device=torch.device("cpu")),
    "disk": lambda model, folder: disk_offload(model, folder, execution_device=torch.device("cpu")),
    "map": spread,
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", SPREAD)
def test_offloaded_weights(kind: str, tied: bool, tmp_path: Path) -> None:
    plain = zoo.backbone(tie_word_embeddings=tied)
    backbone = Backbone(SPREAD[kind](zoo.model(tie_word_embeddings=tied), tmp_path), zoo.tokenizer())
    assert next(iter(backbone.layers[1].parameters())).is_meta, "the weights are not there between forwards"
    assert (backbone.device, backbone.vocab_size) == (torch.device("cpu"), zoo.VOCAB)
    assert backbone.fingerprint() == plain.fingerprint()
    assert weights_hash(backbone.model) == weights_hash(plain.model)
    torch.testing.assert_close(backbone.output_weight, plain.output_weight)
    check_all(backbone, own(plain.model))


# -- quantised weights -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    zoo.model(hidden_size=64, intermediate_size=128).save_pretrained(folder)
    zoo.tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("form", "package"), [("8bit", "bitsandbytes"), ("4bit", "bitsandbytes"), ("int8", "torchao")])
def test_quantised_weights(form: str, package: str, stored: Path) -> None:
    pytest.importorskip(package)
    backbone = load_backbone(str(stored), quantize=form)
    before = backbone.fingerprint()
    assert before != load_backbone(str(stored)).fingerprint()
    if form == "8bit":  # its outliers are those of all tokens of a forward, so that drafts change its rounding
        assert ours(backbone, METHODS["eagle3"].build(backbone))[0] == own(backbone.model)[0]
    else:
        check_all(backbone, own(backbone.model), METHODS)
    assert backbone.fingerprint() == before, "the weights are the same after forwards"


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Int4WeightOnlyConfig"])
def test_everything_quantised_by_torchao(kind: str) -> None:
    """The output projection, too, whose rows heads start from."""
    quantization = pytest.importorskip("torchao.quantization")
    model = zoo.model(hidden_size=64, intermediate_size=128)
    exact = model.lm_head.weight.detach().clone()
    try:
        quantization.quantize_(model, getattr(quantization, kind)())
    except (ImportError, RuntimeError, AssertionError) as error:
        pytest.skip(f"{kind} does not run here: {error}")
    backbone = Backbone(model, zoo.tokenizer())
    torch.testing.assert_close(backbone.output_weight, exact, rtol=0.1, atol=0.03)
    assert backbone.fingerprint() != zoo.backbone(hidden_size=64, intermediate_size=128).fingerprint()
    check_all(backbone, own(model))


def test_a_quantised_output_projection_is_read_through_its_module() -> None:
    """Without any library: a module whose weight is no matrix of numbers."""

    class Packed(torch.nn.Module):
        def __init__(self, exact: Tensor) -> None:
            super().__init__()
            self.out_features, self.in_features = exact.shape
            scale = exact.abs().amax(1, keepdim=True) / 127
            self.register_buffer("scale", scale)
            self.register_buffer("qweight", (exact / scale).round().to(torch.int8))

        def forward(self, states: Tensor) -> Tensor:
            return states @ (self.qweight * self.scale).T

    model = zoo.model()
    exact = model.lm_head.weight.detach().clone()
    model.lm_head = Packed(exact)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Packed(layer.self_attn.q_proj.weight.detach())
    torch.testing.assert_close(matrix_of(model.lm_head), exact, rtol=0.02, atol=0.02)
    backbone = Backbone(model, zoo.tokenizer())
    assert backbone.vocab_size == zoo.VOCAB
    check_all(backbone, own(model), ["eagle3", "medusa"])
    before = backbone.fingerprint()
    model.model.layers[2].self_attn.q_proj.qweight += 1
    assert backbone.fingerprint() != before


def test_forms_are_named(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="quantize is '3bit'; choose 8bit, 4bit, int8"):
        load_backbone(str(stored), quantize="3bit")
    monkeypatch.setattr("headstart.heads.load.find_spec", lambda name: None)
    with pytest.raises(UserError, match="quantize=4bit needs bitsandbytes: pip install bitsandbytes"):
        load_backbone(str(stored), quantize="4bit")


# -- without a tokenizer -----------------------------------------------------------------------------------------------


def test_why_there_is_no_tokenizer_is_said_when_it_is_needed(tmp_path: Path) -> None:
    zoo.model().save_pretrained(tmp_path)
    backbone = load_backbone(str(tmp_path))
    assert Generator(backbone).generate([5, 6], max_new_tokens=2, do_sample=False).tokens
    with pytest.raises(UserError, match=f"{tmp_path}: no tokenizer could be loaded"):
        backbone.encode("red sun")
    assert transformers.AutoConfig.from_pretrained(tmp_path).model_type == "llama"


def test_flags_ask_for_quantised_weights_and_a_map(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("headstart.heads.load.find_spec", lambda name: None)
    for form, package in (("8bit", "bitsandbytes"), ("4bit", "bitsandbytes"), ("int8", "torchao")):
        with pytest.raises(UserError, match=f"quantize={form} needs {package}: pip install {package}"):
            backbone_of(BackboneOptions(backbone=str(tmp_path), quantize=form))  # type: ignore[arg-type]
    zoo.model().save_pretrained(tmp_path)
    zoo.tokenizer().save_pretrained(tmp_path)
    backbone = backbone_of(BackboneOptions(backbone=str(tmp_path), device_map="auto"))
    assert ours(backbone, "ngram") == own(zoo.model())
