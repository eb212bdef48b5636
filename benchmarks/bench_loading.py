"""How fast weights come to the GPU: a Llama-3.1-8B of random numbers is written as safetensors and
loaded, from the page cache and from the disk, beside what the disk and the link can do.

The ceiling is the lower of the two rates: reading the same file by as many threads into pinned
memory that is there already, and copies of pinned memory to the GPU. A process's first load, which
has its pinned memory still to take, is measured in processes of its own (--fresh). From start to
ready is measured with these weights and with random ones.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

import rows
from bench_throughput import OPTIONS, SHAPES
from pagedkv.config import EngineConfig
from pagedkv.engine import Engine
from pagedkv.engine.loaded_model import LoadedModel, describe
from pagedkv.engine.loading_progress import shown
from pagedkv.engine.memory_plan import log_prediction
from pagedkv.models import load_model
from pagedkv.weights import open_checkpoint

_PIECE = 8 * 2**20
_NUM_THREADS = 16


def write(folder: Path, num_layers: int) -> int:
    """The model in shards of 4 layers; returns its bytes."""
    config = {**SHAPES["Llama-3.1-8B"], "num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    hidden, inner, kv, vocab = 4096, 14336, 1024, 128256
    weight_map: dict[str, str] = {}
    num_bytes = 0

    def save(shapes: dict[str, tuple[int, ...]], shard: str) -> None:
        nonlocal num_bytes
        tensors = {
            name: (torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02).cpu()
            for name, shape in shapes.items()
        }
        save_file(tensors, folder / shard)
        num_bytes += sum(one.nbytes for one in tensors.values())
        weight_map.update(dict.fromkeys(shapes, shard))

    save(
        {
            "model.embed_tokens.weight": (vocab, hidden),
            "model.norm.weight": (hidden,),
            "lm_head.weight": (vocab, hidden),
        },
        "model-head.safetensors",
    )
    for first in range(0, num_layers, 4):
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(first, min(first + 4, num_layers)):
            name = f"model.layers.{layer}"
            shapes |= {
                f"{name}.input_layernorm.weight": (hidden,),
                f"{name}.post_attention_layernorm.weight": (hidden,),
                f"{name}.self_attn.q_proj.weight": (hidden, hidden),
                f"{name}.self_attn.k_proj.weight": (kv, hidden),
                f"{name}.self_attn.v_proj.weight": (kv, hidden),
                f"{name}.self_attn.o_proj.weight": (hidden, hidden),
                f"{name}.mlp.gate_proj.weight": (inner, hidden),
                f"{name}.mlp.up_proj.weight": (inner, hidden),
                f"{name}.mlp.down_proj.weight": (hidden, inner),
            }
        save(shapes, f"model-{first:02}.safetensors")
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return num_bytes


def forget(folder: Path) -> None:
    """Have the page cache drop the files, so that the disk is read."""
    os.sync()
    for file in folder.glob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_rate(folder: Path) -> float:
    """Bytes/s of reading all files by threads, into memory that is there already."""
    pieces = [torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(_NUM_THREADS)]
    spans = [
        (file, offset)
        for file in sorted(folder.glob("*.safetensors"))
        for offset in range(0, file.stat().st_size, _PIECE)
    ]

    def work(i: int) -> int:
        memory, count = memoryview(pieces[i].numpy()), 0
        for file, offset in spans[i::_NUM_THREADS]:
            fd = os.open(file, os.O_RDONLY)
            count += os.preadv(fd, [memory], offset)
            os.close(fd)
        return count

    begin = time.perf_counter()
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        num_bytes = sum(pool.map(work, range(_NUM_THREADS)))
    return num_bytes / (time.perf_counter() - begin)


def link_rate() -> float:
    """Bytes/s of pinned memory to the GPU."""
    source = torch.empty(2**29, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(2**29, dtype=torch.uint8, device="cuda")
    target.copy_(source)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(8):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return 8 * source.nbytes / (time.perf_counter() - begin)


def loaded(folder: Path) -> LoadedModel:
    """As pagedkv.engine.loading has it, but for the tokenizer, which these weights have not."""
    checkpoint = open_checkpoint(folder)
    tensors = shown(checkpoint.tensors("cuda"), len(checkpoint.tensor_names))
    model = load_model(
        checkpoint.config, tensors, dtype=torch.bfloat16, device="cuda", max_model_len=32768
    )
    torch.cuda.synchronize()
    return describe(model, torch.bfloat16, torch.device("cuda", 0), max_model_len=32768)


def ready_seconds(make: Callable[[], object]) -> float:
    begin = time.perf_counter()
    made = make()
    seconds = time.perf_counter() - begin
    del made
    gc.collect()
    torch.cuda.empty_cache()
    return seconds


def load_row(shape: str, num_bytes: int, seconds: float, ceiling: float) -> rows.Row:
    """ceiling: bytes/s that the files can be read and moved at."""
    rate = num_bytes / seconds
    return rows.Row(
        name=f"{num_bytes / 1e9:.1f} GB",
        shape=shape,
        us=seconds * 1e6,
        rate=f"{rate / 1e9:.2f} GB/s",
        ceiling_percent=100 * rate / ceiling,
        limit=">= 60 %",
        holds=rate >= 0.6 * ceiling,
    )


def measure(folder: Path, num_bytes: int, state: str, link: float, notes: list[str]) -> rows.Row:
    """state: "disk", where nothing of the files is in memory yet, or "page cache": the median of
    three runs.
    """
    if state == "disk":
        forget(folder)
    read = read_rate(folder)
    if state == "disk":
        forget(folder)
    num_runs = 1 if state == "disk" else 3
    times = [ready_seconds(lambda: loaded(folder)) for _ in range(num_runs)]
    seconds = statistics.median(times)
    each = ", ".join(f"{one:.2f}" for one in times)
    notes.append(f"{folder.parent}, {state}: reading alone {read / 1e9:.2f} GB/s; {each} s")
    return load_row(f"{folder.parent}, {state}", num_bytes, seconds, min(read, link))


def first_load(folder: Path) -> None:
    """In a process that has done nothing else: bytes/s of reading and of the link, and seconds."""
    torch.cuda.init()
    read, link = read_rate(folder), link_rate()
    print(json.dumps([read, link, ready_seconds(lambda: loaded(folder))]), flush=True)


def fresh(folder: Path, num_bytes: int, num_processes: int) -> list[rows.Row]:
    """The same files, loaded once by each of so many processes, one after the other."""
    made = []
    for i in range(num_processes):
        command = [sys.executable, __file__, "--first-load", str(folder)]
        told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        read, link, seconds = json.loads(told.splitlines()[-1])
        shape = f"{folder.parent}, first load of process {i + 1}"
        shape += f" (reading {read / 1e9:.1f} GB/s, link {link / 1e9:.1f})"
        made.append(load_row(shape, num_bytes, seconds, min(read, link)))
        print(made[-1], flush=True)
    return made


def start(folder: Path, num_layers: int) -> list[rows.Row]:
    """From nothing to an engine that can take requests."""
    config = EngineConfig.from_options(str(folder), **OPTIONS)

    def predicted_and_loaded() -> Engine:
        shape = open_checkpoint(folder).config
        log_prediction(config, shape, torch.bfloat16, torch.device("cuda", 0))
        return Engine(loaded(folder), config)

    makers: dict[str, Callable[[], object]] = {
        "these weights": predicted_and_loaded,
        "random weights": lambda: Engine.from_config(config),
    }
    made = []
    for what, make in makers.items():
        seconds = ready_seconds(make)
        made.append(
            rows.Row(
                f"{num_layers} layers",
                f"start to ready, {what}",
                seconds * 1e6,
                limit="<= 20 s",
                holds=seconds <= 20,
            )
        )
        print(made[-1], flush=True)
    return made


def main() -> int:
    arguments = rows.parser(__doc__.splitlines()[0])
    arguments.add_argument("--disk", type=Path, help="a folder on a disk")
    arguments.add_argument("--memory", type=Path, help="a folder in memory")
    arguments.add_argument("--layers", type=int, default=32)
    arguments.add_argument("--fresh", type=int, default=0, help="processes that load once")
    arguments.add_argument("--first-load", type=Path, help="be one of them, for these files")
    options = arguments.parse_args()
    if options.first_load is not None:
        first_load(options.first_load)
        return 0
    torch.cuda.init()
    link = link_rate()
    notes = [f"pinned memory to the GPU: {link / 1e9:.1f} GB/s"]
    made: list[rows.Row] = []
    for parent, states in (
        (options.disk, ["disk", "page cache"]),
        (options.memory, ["page cache"]),
    ):
        if parent is None:
            continue
        with tempfile.TemporaryDirectory(dir=parent) as name:
            folder = Path(name)
            num_bytes = write(folder, options.layers)
            for state in states:
                made.append(measure(folder, num_bytes, state, link, notes))
                print(made[-1], flush=True)
            made += fresh(folder, num_bytes, options.fresh)
            made += start(folder, options.layers)
    return rows.report("loading", made, save=options.save, notes=notes)


if __name__ == "__main__":
    sys.exit(main())
