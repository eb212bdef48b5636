"""Snapshots of a manager as SVG: the pool as an array of blocks with their holders and ref counts,
below it the block table of every sequence; of a beam search also the tree that the tables make.
"""

from __future__ import annotations

from html import escape
from itertools import pairwise
from pathlib import Path

from claims.figures import FOLDER
from claims.scenes import SCENES, Moment
from pagedkv.block_manager import BlockState, Snapshot
from pagedkv.inspect import draw_cache

CELL, HIGH, LEFT = 44, 30, 120
COLORS = ("#7fc8a9", "#f2b880", "#9db4e0", "#e3a0b5", "#c9c27a", "#b7a0d6")
_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" '
    'font-family="sans-serif" font-size="12">\n<rect width="{w}" height="{h}" fill="white"/>'
)


def save_all(folder: Path = FOLDER) -> list[Path]:
    """Every scene as SVG and as text."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = []
    for name, scene in SCENES.items():
        moments = scene()
        for suffix, content in (("svg", picture(moments)), ("txt", text(moments))):
            path = folder / f"picture-{name}.{suffix}"
            path.write_text(content)
            saved.append(path)
    return saved


def text(moments: list[Moment]) -> str:
    """As `pagedkv draw` draws."""
    parts = []
    for moment in moments:
        drawn = draw_cache(moment.snapshot, moment.names).plain
        lines = [line.rstrip() for line in drawn.splitlines()]
        parts.append(f"== {moment.title}.\n\n" + "\n".join(lines).rstrip() + "\n")
    return "\n".join(parts)


def picture(moments: list[Moment]) -> str:
    """One below the other. Those with more than two sequences get a tree."""
    parts: list[str] = []
    top, width = 10, 0
    for moment in moments:
        drawing = _Drawing(moment.snapshot, moment.names, top)
        drawing.title(moment.title)
        drawing.pool()
        drawing.tables()
        if len(drawing.tables_by_seq) > 2:
            drawing.tree()
        parts += drawing.parts
        top, width = drawing.top + 14, max(width, drawing.width)
    return "\n".join([_HEAD.format(w=width + 10, h=top), *parts, "</svg>\n"])


class _Drawing:
    def __init__(self, snapshot: Snapshot, names: dict[int, str], top: int) -> None:
        self.parts: list[str] = []
        self.top = top
        self.width = LEFT + CELL * snapshot.statistics.num_blocks
        self._snapshot = snapshot
        self._names = names
        seq_ids, bounds = snapshot.seq_ids.tolist(), pairwise(snapshot.seq_start_loc.tolist())
        self.tables_by_seq: dict[int, list[int]] = {
            seq_id: snapshot.block_ids[begin:end].tolist()
            for seq_id, (begin, end) in zip(seq_ids, bounds, strict=True)
        }
        self._colors = {seq_id: COLORS[i % len(COLORS)] for i, seq_id in enumerate(seq_ids)}
        self._holders: dict[int, list[int]] = {}
        for seq_id, table in self.tables_by_seq.items():
            for block in table:
                self._holders.setdefault(block, []).append(seq_id)

    def title(self, words: str) -> None:
        self._text(8, self.top + 12, words, weight="bold")
        self.top += 22

    def pool(self) -> None:
        counts, states = self._snapshot.ref_counts.tolist(), self._snapshot.states.tolist()
        self._text(8, self.top + 19, "pool")
        for block, (count, state) in enumerate(zip(counts, states, strict=True)):
            note = f"ref {count}" if count else ""
            if state == BlockState.CACHED_IDLE.value:
                note = "cached"
            self._cell(LEFT + block * CELL, block, str(block), note)
        self.top += HIGH + 20
        num_cpu = self._snapshot.statistics.num_cpu_blocks
        if num_cpu:
            self._text(8, self.top + 19, "CPU pool")
            for block in range(num_cpu):
                self._cell(LEFT + block * CELL, -1 - block, f"cpu{block}", "")
            self.top += HIGH + 8

    def tables(self) -> None:
        """Each table's blocks in order, with the tokens that are in them."""
        seq_ids, lens = self._snapshot.seq_ids.tolist(), self._snapshot.seq_num_tokens.tolist()
        tokens = dict(zip(seq_ids, lens, strict=True))
        size = self._snapshot.block_size
        for seq_id, table in self.tables_by_seq.items():
            name = self._names.get(seq_id, str(seq_id))
            self._text(8, self.top + 19, name, fill="#222")
            for place, block in enumerate(table):
                filled = min(size, tokens[seq_id] - place * size)
                label = str(block) if block >= 0 else f"cpu{-1 - block}"
                self._cell(LEFT + place * CELL, block, label, f"{filled}/{size}")
            self.top += HIGH + 20

    def tree(self) -> None:
        """A column for each logical block, a node for each block in it, lines as the tables go."""
        places: dict[tuple[int, int], int] = {}
        depth: dict[int, int] = {}
        for table in self.tables_by_seq.values():
            for column, block in enumerate(table):
                if (column, block) not in places:
                    places[column, block] = depth.get(column, 0)
                    depth[column] = places[column, block] + 1
        step, high = 2 * CELL, HIGH + 22

        def corner(column: int, block: int) -> tuple[int, int]:
            return LEFT + column * step, self.top + places[column, block] * high

        lines = {
            ((column, table[column]), (column + 1, table[column + 1]))
            for table in self.tables_by_seq.values()
            for column in range(len(table) - 1)
        }
        self._text(8, self.top + 19, "as a tree")
        for one, other in sorted(lines):
            (x, y), (u, v) = corner(*one), corner(*other)
            self.parts.append(
                f'<line x1="{x + CELL - 4}" y1="{y + HIGH // 2}" x2="{u}" y2="{v + HIGH // 2}" '
                'stroke="#555"/>'
            )
        for column, block in places:
            x, y = corner(column, block)
            top, self.top = self.top, y
            self._cell(x, block, str(block), f"ref {len(self._holders[block])}")
            self.top = top
        self.top += max(depth.values(), default=0) * high

    def _cell(self, x: int, block: int, label: str, note: str) -> None:
        """A box striped in its holders' colours."""
        holders = self._holders.get(block, [])
        for i, seq_id in enumerate(holders):
            high = HIGH / len(holders)
            self.parts.append(
                f'<rect x="{x}" y="{self.top + i * high:g}" width="{CELL - 4}" height="{high:g}" '
                f'fill="{self._colors[seq_id]}"/>'
            )
        self.parts.append(
            f'<rect x="{x}" y="{self.top}" width="{CELL - 4}" height="{HIGH}" '
            'fill="none" stroke="#555"/>'
        )
        self._text(x + CELL // 2 - 2, self.top + 19, label, anchor="middle")
        self._text(x + CELL // 2 - 2, self.top + HIGH + 11, note, anchor="middle", size=9)

    def _text(
        self,
        x: int,
        y: int,
        words: str,
        *,
        anchor: str = "start",
        weight: str = "normal",
        fill: str = "#222",
        size: int = 12,
    ) -> None:
        if words:
            self.parts.append(
                f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" '
                f'font-size="{size}" fill="{fill}">{escape(words)}</text>'
            )
