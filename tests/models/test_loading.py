"""Strict loading: every tensor is used or named, every parameter filled."""

from __future__ import annotations

import logging

import pytest
import torch
from paged_run import PagedRun
from tiny_llama import reference_logits, tiny_llama

from pagedkv.models import CausalLM, load_model

IDS = [5, 1, 90, 33]


def parts(**changes: object) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """config.json and tensors of a tiny model; a tied one's lm_head is not among them."""
    model = tiny_llama(**{"num_hidden_layers": 2, **changes})
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if changes.get("tie_word_embeddings"):
        del state["lm_head.weight"]
    return model.config.to_dict(), state


def load(config: dict[str, object], state: dict[str, torch.Tensor], **options: object) -> CausalLM:
    return load_model(
        config,
        state.items(),
        **{"dtype": torch.float32, "device": "cpu", **options},  # type: ignore[arg-type]
    )


def logits_of(model: CausalLM) -> torch.Tensor:
    return PagedRun(model, num_seqs=1, max_len=4).logits(0, IDS, [4])


def refusal(config: dict[str, object], state: dict[str, torch.Tensor]) -> str:
    with pytest.raises(ValueError, match="the checkpoint does not fit LlamaForCausalLM") as caught:
        load(config, state)
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.input_layernorm.weight",
    ],
)
def test_a_missing_tensor_is_named(name: str) -> None:
    config, state = parts()
    del state[name]
    assert f"missing tensors (1): {name}" in refusal(config, state)


def test_a_tensor_that_no_parameter_takes_is_named() -> None:
    config, state = parts()
    state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(40)
    state["model.layers.2.input_layernorm.weight"] = torch.zeros(40)
    assert (
        "unexpected tensors (2): model.layers.0.self_attn.q_proj.bias, "
        "model.layers.2.input_layernorm.weight"
    ) in refusal(config, state)


def test_a_tensor_of_another_shape_is_named_with_both_shapes() -> None:
    config, state = parts()
    name = "model.layers.1.self_attn.v_proj.weight"
    state[name] = torch.zeros(40, 40)
    assert refusal(config, state).endswith(
        f"unfit tensors (1): {name} is [40, 40], expected [20, 40]"
    )


def test_all_problems_are_in_one_message_that_stays_short() -> None:
    config, state = parts(num_hidden_layers=12)
    few = {"model.embed_tokens.weight": torch.zeros(1, 1), "foo": torch.zeros(1)}
    message = refusal(config, few)
    assert f"missing tensors ({len(state) - 1}): lm_head.weight, model.layers.0." in message
    assert "unexpected tensors (1): foo" in message
    assert "unfit tensors (1): model.embed_tokens.weight is [1, 1], expected [97, 40]" in message
    assert len(message) < 1000


def test_names_of_a_file_are_shown_on_one_short_line() -> None:
    config, state = parts()
    odd = {"a\nb\x1b[31m": torch.zeros(1), "x" * 10**6: torch.zeros(1)}
    message = refusal(config, state | odd)
    assert "unexpected tensors (2): 'a\\nb\\x1b[31m', xxx" in message
    assert message.isprintable()
    assert len(message) < 600


def test_biases_that_the_config_promises_must_be_there() -> None:
    config, state = parts()
    assert "missing tensors (8): model.layers.0.self_attn.k_proj.bias" in refusal(
        {**config, "attention_bias": True}, state
    )


@pytest.mark.parametrize("differs", [False, True])
def test_a_head_beside_a_tied_embedding_is_skipped_with_a_warning_if_it_differs(
    differs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config, state = parts(tie_word_embeddings=True)
    plain = logits_of(load(config, state))
    state["lm_head.weight"] = state["model.embed_tokens.weight"] + (1 if differs else 0)
    with caplog.at_level(logging.WARNING):
        again = logits_of(load(config, state))
    assert torch.equal(plain, again)
    assert ("lm_head.weight with other values" in caplog.text) == differs


def test_an_untied_head_is_used() -> None:
    config, state = parts()
    before = logits_of(load(config, state))
    state["lm_head.weight"] *= 2
    torch.testing.assert_close(logits_of(load(config, state)), 2 * before)


def test_frequencies_in_old_checkpoints_are_skipped() -> None:
    config, state = parts()
    before = logits_of(load(config, state))
    for layer in range(2):
        state[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.full((5,), 7.0)
    assert torch.equal(before, logits_of(load(config, state)))


def test_tensors_may_come_in_any_order_and_dtype() -> None:
    config, state = parts()
    model = tiny_llama(num_hidden_layers=2)
    shuffled = {name: state[name].double() for name in sorted(state, reverse=True)}
    torch.testing.assert_close(
        logits_of(load(config, shuffled)), reference_logits(model, IDS), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.int8}, "dtype is torch.int8; supported are torch.float32, torch.bfloat16"),
        ({"max_model_len": 0}, "max_model_len is 0, but the model allows 1 to 64"),
        ({"max_model_len": 65}, "max_model_len is 65, but the model allows 1 to 64"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(*parts(), **options)


def test_a_huge_context_must_be_asked_for() -> None:
    """Positions cost memory, and a number in a file costs nothing."""
    config, state = parts()
    huge = {**config, "max_position_embeddings": 2**31 - 1}
    with pytest.raises(ValueError, match="is 2147483647, more than 1048576; choose how many"):
        load(huge, state)
    assert torch.equal(
        logits_of(load(huge, state, max_model_len=64)), logits_of(load(config, state))
    )


def test_a_failing_reader_is_not_swallowed() -> None:
    config, state = parts()

    def broken():  # type: ignore[no-untyped-def]
        yield next(iter(state.items()))
        raise ValueError("the file ends here")

    with pytest.raises(ValueError, match="the file ends here"):
        load_model(config, broken(), dtype=torch.float32, device="cpu")
