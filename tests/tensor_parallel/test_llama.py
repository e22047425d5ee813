"""transformers' Llama and models built like it, changed in place: alone, and with data parallelism on a mesh."""

import copy

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from scratch_ddp.ddp import BucketedDDP, FlatDDP
from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.tensor_parallel import (
    LLAMA,
    LLAMA_SEQUENCE,
    clip_grad_norm_,
    gather_full_params,
    parallelize,
)
from tests.ranks import in_turn, message_of, run_ranks
from tests.tensor_parallel.cases import SMALL_LLAMA, TOKENS, VOCABULARY, assert_close, assert_same_model, ids, llama

BLOCKS, WIDTH = SMALL_LLAMA["num_hidden_layers"], SMALL_LLAMA["hidden_size"]
ROWS = 2


HIDDEN, A_TOKEN, CALLS = ROWS * TOKENS * WIDTH * 8, ROWS * TOKENS * 8, 1 + 2 * BLOCKS


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def torchs_clip(model: torch.nn.Module, *args: float) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), *args, foreach=False)


def compare(shape: tuple[int, int], plan: dict, tied: bool = False, norm_type: float = 2.0, clip=clip_grad_norm_):
    """Three steps on a mesh (dp, tp) beside one process, with clipping; and what they cost."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    plain, model = llama(tie_word_embeddings=tied), llama(tie_word_embeddings=tied)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, model)]  # before slicing
    before = model(input_ids=ids(1)).logits  # of the whole model, whose graph is still alive
    sliced = parallelize(model, plan, mesh["tp"])
    assert before.requires_grad and (sliced.lm_head.weight is sliced.model.embed_tokens.weight) == tied
    replica = (BucketedDDP if plan is LLAMA else FlatDDP)(sliced, group=mesh["dp"])
    for step in range(3):
        tokens = ids(ROWS * shape[0], seed=step)
        mine = tokens.chunk(shape[0])[mesh["dp"].get_local_rank()]
        next_token_loss(plain(input_ids=tokens).logits, tokens).backward()
        with traffic() as forward:
            loss = replica(input_ids=mine, labels=mine).loss
        with traffic() as backward, replica.no_sync():
            loss.backward()
        assert_close(loss, next_token_loss(plain(input_ids=mine).logits, mine))
        replica.sync_gradients()
        assert_same_model(sliced, plain)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        with traffic() as clipping:
            assert_close(clip(sliced, 0.1, norm_type), norm)
        assert clipping.calls.keys() == {"all_reduce"}
        assert_same_model(sliced, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if plan is LLAMA:
        # Forward: the embedding, two in each block, two for the loss. Backward: two in each block, and the head's.
        assert forward.calls == {"all_reduce": CALLS + 2} and backward.calls == {"all_reduce": CALLS}
        moved, norms = CALLS * HIDDEN, 0
    else:
        moves = {"all_gather": CALLS, "reduce_scatter": CALLS}
        assert forward.calls == moves | {"all_reduce": 2} and backward.calls == moves | {"all_reduce": CALLS}
        # An all-gather is counted by what a rank puts in. In backward an all-reduce for each norm.
        moved, norms = CALLS * (HIDDEN + HIDDEN // shape[1]), CALLS * WIDTH * 8
    assert (forward.payload_bytes, backward.payload_bytes) == (moved + 3 * A_TOKEN, moved + norms)


STEPS = {
    2: [((1, 2), LLAMA), ((1, 2), LLAMA, True, float("inf")), ((1, 2), LLAMA_SEQUENCE)],
    4: [
        *[((1, 4), LLAMA), ((1, 4), LLAMA_SEQUENCE, True)],
        *[((2, 2), plan, False, 2.0, torchs_clip) for plan in (LLAMA, LLAMA_SEQUENCE)],
    ],
}


@pytest.mark.parametrize("world_size", STEPS)
def test_equals_one_process_and_costs_what_it_says(world_size):
    in_turn(world_size, compare, STEPS[world_size])


def optimizers_agree() -> None:
    """Every way in which torch's optimizers go through parameters; a gradient of one's own; an inf on one rank."""
    for settings in ({}, {"foreach": True}, {"foreach": False}, {"fused": True}):
        plain, sliced = llama(), parallelize(llama(), LLAMA)
        for model in (plain, sliced):
            model(input_ids=ids(), labels=ids()).loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **settings).step()
        assert_same_model(sliced, plain, atol=1e-7)  # transformers' own loss is computed in float32
    weight = sliced.lm_head.weight
    weight.grad = torch.full_like(weight, dist.get_rank() + 1.0)
    assert_close(weight.grad.norm(), (weight.numel() * torch.tensor(5.0, dtype=torch.float64)).sqrt())
    for norm in (torch.Tensor.norm, torch.norm, torch.linalg.vector_norm):
        assert norm(weight.grad, 1).item() == 3 * weight.numel() and norm(weight.grad, float("inf")).item() == 2
    assert type(weight.grad.norm(dim=0)) is type(weight.grad + 1) is type(weight + 1) is torch.Tensor
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(sliced.parameters(), lr=1.0)
    scaler.scale(sliced(input_ids=ids(), labels=ids()).loss).backward()
    if dist.get_rank():
        weight.grad[0, 0] = torch.inf
    before = gather_full_params(sliced)
    scaler.step(optimizer)
    for name, parameter in gather_full_params(sliced).items():
        assert_close(parameter, before[name])


def test_optimizers_and_the_gradient_of_a_slice():
    run_ranks(2, optimizers_agree)


def whole_logits() -> None:
    """Of a head that gathers them: the loss is right, and so is text."""
    plain, sliced = llama(), parallelize(llama(), LLAMA)
    sliced.lm_head.gather_output = True
    for model in (plain, sliced):
        model(input_ids=ids(), labels=ids()).loss.backward()
    assert_same_model(sliced, plain, atol=1e-7)  # transformers' own loss is computed in float32
    texts = [model.generate(ids(1), max_new_tokens=4, do_sample=False) for model in (plain, sliced)]
    assert texts[0].equal(texts[1])


def test_whole_logits():
    run_ranks(2, whole_logits)


ARCHITECTURES = {  # that LLAMA is for, and the word in the refusal of others
    "Qwen3": None,  # a norm of each head
    "Cohere": None,  # blocks without a second norm
    "Exaone4": None,  # norms of each head, and norms after attention and MLP
    "Gemma": "this GemmaTextScaledWordEmbedding has a forward",
    "Olmo2": "model.layers.0.self_attn: 'q_norm.weight' would be whole among slices",
    "StableLm": "model.layers.0.self_attn: it cuts by its own num_heads",
    "Phi3": "the plan's 'q_proj' matches no module; is qkv_proj meant?",
}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
TOKENS_OF = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def other_architectures() -> None:
    for name, refusal in ARCHITECTURES.items():
        config = getattr(transformers, f"{name}Config")(num_key_value_heads=2, **SIZES, **TOKENS_OF)
        for plan in (LLAMA, LLAMA_SEQUENCE):
            torch.manual_seed(0)
            plain = transformers.AutoModelForCausalLM.from_config(config).double()
            sliced, before = copy.deepcopy(plain), str(plain)
            if refusal:
                assert refusal in message_of(lambda s=sliced, p=plan: parallelize(s, p)), name
                assert str(sliced) == before  # nothing has been changed
                continue
            loss = plain(input_ids=ids(), labels=ids()).loss
            parallelize(sliced.requires_grad_(False), plan).requires_grad_()  # frozen, and trained later
            its_loss = sliced(input_ids=ids(), labels=ids()).loss
            for each in (loss, its_loss):
                each.backward()
            torch.testing.assert_close(its_loss.double(), loss.double(), rtol=0, atol=1e-6)  # float32 in places
            assert_same_model(sliced, plain, atol=1e-6)


def test_models_built_like_a_llama():
    for name in ARCHITECTURES:
        getattr(transformers, f"{name}ForCausalLM")  # imported here once, and not in every forked rank
    run_ranks(2, other_architectures, timeout=120)
