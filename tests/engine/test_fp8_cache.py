"""An fp8 cache: half the bytes, its scales, and answers that stay what they are with 16 or 32 bits.

Queries attend to what is stored, also to the keys of their own step. So chunks, prefix hits and
preemption change no answer with 8 bits either.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run

from pagedkv.config import CacheConfig, EngineConfig
from pagedkv.engine import Engine
from pagedkv.engine.kv_scales import measured_scales, scales_for
from pagedkv.engine.loading import LoadedModel, describe, load
from pagedkv.kv_cache import CacheShape, KVCache
from pagedkv.models import load_model
from pagedkv.replay import Recorder, changed_settings, compare, settings_of
from pagedkv.replay import load as load_recording
from pagedkv.sampling_params import SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
from tiny_llama import tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=24)
TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea, a storm",
]
PRESSURES: dict[str, dict[str, Any]] = {
    "chunks of 4": {"max_num_seqs": 4, "max_num_batched_tokens": 4},
    "no prefix cache": {"enable_prefix_caching": False},
    "computed again": {"num_gpu_blocks_override": 16, "watermark": 0.0},
    "swapped": {
        "num_gpu_blocks_override": 16,
        "watermark": 0.0,
        "swap_space": 0.01,
        "preemption_mode": "swap",
    },
}


def tiny(
    dtype: torch.dtype = torch.float32, scales: dict[str, torch.Tensor] | None = None, **kinds: Any
) -> LoadedModel:
    reference = tiny_llama(**kinds)
    config = reference.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    tensors = reference.state_dict() | (scales or {})
    model = load_model(config, tensors.items(), dtype=dtype, device="cpu")
    return describe(model, dtype, torch.device("cpu"))


def engine_of(loaded: LoadedModel, **options: Any) -> Engine:
    return Engine(loaded, EngineConfig.from_options("tiny", **options))


def answers(engine: Engine, prompts: list[Any], params: SamplingParams) -> list[list[int]]:
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    outputs = run(engine)[0]
    assert all(output.error is None for output in outputs.values())
    return [outputs[str(i)].outputs[0].token_ids for i in range(len(prompts))]


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LoadedModel]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load(EngineConfig.from_options("smollm2", dtype="float32", max_model_len=256))
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_block_takes_a_byte_for_each_number(dtype: torch.dtype, kv_cache_dtype: str) -> None:
    loaded = tiny(dtype)
    sizes = {}
    for kind in ("auto", kv_cache_dtype):
        engine = engine_of(
            loaded, kv_cache_dtype=kind, kv_cache_memory_bytes=2**20, swap_space=2**-10
        )
        cache = engine._runner._kv_cache
        sizes[kind] = engine.statistics().num_blocks
        assert cache.tensor.shape[2] == sizes[kind]
        assert cache.bytes_per_block * sizes[kind] <= 2**20
        assert cache.num_cpu_blocks == sizes[kind]  # both pools have a MiB
        assert engine._facts.bytes_per_token * 16 == cache.bytes_per_block
        assert engine._scheduler._preemption._bytes_per_block == cache.bytes_per_block
        assert len(answers(engine, [[1, 2, 3], list(range(40))], GREEDY)) == 2
    assert cache.tensor.dtype == {"fp8_e5m2": torch.float8_e5m2}.get(
        kv_cache_dtype, torch.float8_e4m3fn
    )
    assert sizes[kv_cache_dtype] // sizes["auto"] == dtype.itemsize


def test_what_is_not_a_dtype_of_the_cache_is_refused_in_words() -> None:
    for wrong in ("int8", "fp8_inc", "", None, 8):
        with pytest.raises(ValueError, match="kv_cache_dtype must be one of auto, fp8, fp8_e4m3"):
            CacheConfig(kv_cache_dtype=wrong)  # type: ignore[arg-type]


def test_a_cache_has_scales_exactly_if_it_is_of_8_bits() -> None:
    wide = CacheShape(3, 2, 8, torch.bfloat16)
    narrow = wide.stored_as("fp8")
    assert (wide.is_fp8, narrow.is_fp8) == (False, True)
    assert wide.stored_as("auto") == wide
    with pytest.raises(ValueError, match=r"float8_e4m3fn has scales of shape \[3, 2, 2\], got No"):
        KVCache(narrow, 1, 16)
    with pytest.raises(ValueError, match=r"shape \[3, 2, 2\], got \[3, 2, 1\]"):
        KVCache(narrow, 1, 16, scales=torch.ones(3, 2, 1))
    with pytest.raises(ValueError, match=r"bfloat16 has scales of shape None, got \[3, 2, 2\]"):
        KVCache(wide, 1, 16, scales=torch.ones(3, 2, 2))


@pytest.mark.parametrize("name", PRESSURES)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_nothing_that_changes_no_answer_changes_one_with_8_bits(
    name: str, kv_cache_dtype: str
) -> None:
    loaded = tiny()
    shared = [5 * i % 97 for i in range(17)]
    prompts = [[*shared, 3], [*shared, 4], [9, 8, 7], [1], [2, 2]]
    options = {"kv_cache_dtype": kv_cache_dtype, "block_size": 4}
    right = [answers(engine_of(loaded, **options), [one], GREEDY)[0] for one in prompts]
    engine = engine_of(loaded, **options, **PRESSURES[name])
    assert answers(engine, prompts, GREEDY) == right
    assert answers(engine, prompts, GREEDY) == right  # now found in the prefix cache
    hits = engine.statistics().prefix_cache_hits
    assert (hits > 0) == (name != "no prefix cache")
    moved = engine._runner.meter._link is not None
    assert moved == (name == "swapped")


def test_forks_of_an_8_bit_block_are_copies_of_their_own() -> None:
    loaded = tiny()
    params = SamplingParams(n=3, temperature=1.0, seed=2, max_tokens=12)
    found = []
    for block_size in (4, 64):  # with 64 every fork copies the block that it begins in
        engine = engine_of(loaded, kv_cache_dtype="fp8", block_size=block_size)
        engine.add_request("a", [1, 2, 3, 4, 5], params)
        output = run(engine)[0]["a"]
        found.append(sorted(one.token_ids for one in output.outputs))
    assert found[0] == found[1]
    assert len(set(map(tuple, found[0]))) == 3


def test_a_recorded_run_is_replayed_with_the_bytes_of_8_bits(tmp_path: Path) -> None:
    engine = engine_of(
        tiny(),
        kv_cache_dtype="fp8",
        block_size=4,
        num_gpu_blocks_override=14,
        swap_space=1e-4,
        watermark=0.0,
    )
    engine.observe(Recorder(tmp_path / "run.jsonl"))
    answers(engine, [[5 * i % 97 for i in range(9 + j)] for j in range(4)], GREEDY)
    assert engine.statistics().num_cpu_blocks == int(1e-4 * 2**30) // (4 * 3 * 2 * 2 * 10)
    recording = load_recording(tmp_path / "run.jsonl")
    assert recording.facts.bytes_per_token == 3 * 2 * 2 * 10
    assert (recording.facts.dtype, recording.cache.kv_cache_dtype) == ("float32", "fp8")
    comparison = compare(recording, changed_settings(settings_of(recording), swap_space=2e-4))
    assert comparison.difference is None
    assert comparison.after.facts.num_cpu_blocks == int(2e-4 * 2**30) // (4 * 3 * 2 * 2 * 10)


# -- scales ----------------------------------------------------------------------------------


def largest_stored(engine: Engine) -> float:
    cache = engine._runner._kv_cache.tensor
    return float(cache.float().nan_to_num().abs().max())


def prompt_logprobs(engine: Engine, prompt: Any) -> torch.Tensor:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    engine._runner._kv_cache.tensor.zero_()
    engine.add_request("a", prompt, params)
    logprobs = run(engine)[0]["a"].prompt_logprobs
    assert logprobs is not None
    return torch.tensor([next(iter(one.values())).logprob for one in logprobs if one])


def test_measured_scales_fit_keys_and_values_of_any_size() -> None:
    """Under scale 1 values 2**-14 times as large would all become 0, and those 2**14 times as large
    the largest number.
    """
    prompt = [7 * i % 97 for i in range(40)]
    found, scales = {}, {}
    for size in (2.0**-14, 1.0, 2.0**14):
        reference = tiny_llama()
        with torch.no_grad():
            for layer in reference.model.layers:
                layer.self_attn.v_proj.weight.mul_(size)
                layer.self_attn.o_proj.weight.div_(size)
        config = reference.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
        model = load_model(
            config, reference.state_dict().items(), dtype=torch.float32, device="cpu"
        )
        loaded = describe(model, torch.float32, torch.device("cpu"))
        engine = engine_of(loaded, kv_cache_dtype="fp8")
        found[size] = prompt_logprobs(engine, prompt)
        assert 448 / 8 < largest_stored(engine) < 448
        scales[size] = measured_scales(loaded, loaded.cache_shape.stored_as("fp8"))
        assert torch.equal(scales[size].log2(), scales[size].log2().round())
        wider = measured_scales(loaded, loaded.cache_shape.stored_as("fp8_e5m2"))
        assert torch.equal(wider, scales[size] / 128)  # 57,344 is 128 times 448
    wide = prompt_logprobs(engine_of(loaded), prompt)
    assert (wide - found[1.0]).abs().mean() < 0.2 * wide.std()
    for size, logprobs in found.items():
        assert torch.equal(scales[size][:, 0], scales[1.0][:, 0])
        assert torch.equal(scales[size][:, 1], scales[1.0][:, 1] * size)
        assert torch.equal(logprobs, found[1.0])  # powers of two round nothing


def test_without_numbers_to_go_by_a_scale_is_1() -> None:
    for broken in (0.0, float("nan")):
        reference = tiny_llama()
        reference.model.layers[1].self_attn.v_proj.weight.data[:10] = broken  # the first head
        config = reference.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
        model = load_model(
            config, reference.state_dict().items(), dtype=torch.float32, device="cpu"
        )
        loaded = describe(model, torch.float32, torch.device("cpu"))
        scales = measured_scales(loaded, loaded.cache_shape.stored_as("fp8"))
        assert scales[1, 1, 0] == 1
        assert bool((scales > 0).all() and scales.isfinite().all())


def test_the_checkpoints_scales_are_used_where_the_cache_has_8_bits() -> None:
    own = {
        f"model.layers.{layer}.self_attn.{part}_scale": torch.tensor(0.25 + layer)
        for layer in range(3)
        for part in "kv"
    }
    plain, loaded = tiny(), tiny(scales=own)
    assert plain.kv_scales is None
    shape = loaded.cache_shape.stored_as("fp8")
    expected = torch.tensor([0.25, 1.25, 2.25])[:, None, None].expand(3, 2, 2)
    scales = scales_for(loaded, shape)
    assert scales is not None
    assert torch.equal(scales, expected)
    engine = engine_of(loaded, kv_cache_dtype="fp8")
    cache = engine._runner._kv_cache
    assert cache.scales is not None
    assert torch.equal(cache.scales, expected)
    # They reach the operators: what is stored in layer 0 is the real value over 0.25.
    wide = engine_of(plain)
    for one in (engine, wide):
        one._runner._kv_cache.tensor.zero_()
        answers(one, [[3, 1, 4, 1, 5]], SamplingParams(temperature=0, max_tokens=1))
    real = wide._runner._kv_cache.tensor[0]
    found = cache.tensor[0].float() * 0.25
    assert real.abs().max() > 1
    assert bool(((found - real).abs() <= real.abs() / 16 + 2**-11).all())
    # A cache of more bits has no use for them.
    assert scales_for(loaded, loaded.cache_shape) is None
    assert answers(engine_of(loaded), [[1, 2, 3]], GREEDY) == answers(
        engine_of(plain), [[1, 2, 3]], GREEDY
    )


# -- SmolLM2 ---------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_log_probabilities_of_a_text_stay_near_those_of_the_wide_cache(
    smollm2: LoadedModel, kv_cache_dtype: str
) -> None:
    text = " ".join(TEXTS) + " The quick brown fox jumps over the lazy dog, and water boils at 100."
    found = {}
    for kind in ("auto", kv_cache_dtype):
        engine = engine_of(smollm2, kv_cache_dtype=kind, num_gpu_blocks_override=20)
        found[kind] = prompt_logprobs(engine, text)
    difference = (found["auto"] - found[kv_cache_dtype]).abs()
    print(kv_cache_dtype, difference.mean(), difference.max(), difference.numel())
    # Three bits behind the leading one, or two. With scales of 1 it is 0.13; with a quarter of
    # these, which cuts large keys off, 0.52.
    assert difference.mean() < (0.2 if kv_cache_dtype == "fp8" else 0.3)
    assert found["auto"].mean() - found[kv_cache_dtype].mean() < 0.05
    largest = torch.finfo(engine._runner._kv_cache.tensor.dtype).max
    assert largest / 8 < largest_stored(engine) < largest  # nothing is cut off


@pytest.mark.model
def test_greedy_text_parts_from_that_of_the_wide_cache_at_near_ties_only(
    smollm2: LoadedModel,
) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=2)
    outputs = {}
    for kind in ("auto", "fp8"):
        engine = engine_of(smollm2, kv_cache_dtype=kind, num_gpu_blocks_override=40)
        for i, text in enumerate(TEXTS):
            engine.add_request(str(i), text, params)
        outputs[kind] = run(engine)[0]
    num_equal = 0
    for i in range(len(TEXTS)):
        wide, narrow = (outputs[kind][str(i)].outputs[0] for kind in ("auto", "fp8"))
        pairs = zip(wide.token_ids, narrow.token_ids, strict=False)
        parted = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        if parted is None:
            num_equal += 1
            continue
        assert wide.logprobs is not None
        best, second = sorted(one.logprob for one in wide.logprobs[parted].values())[-1:-3:-1]
        print(TEXTS[i], "parts at", parted, "where the gap is", best - second)
        assert best - second < 0.4
    assert "Paris" in outputs["fp8"]["0"].outputs[0].text
    assert num_equal >= len(TEXTS) // 2
