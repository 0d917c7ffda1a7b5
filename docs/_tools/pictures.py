"""Draws the pictures of the documentation: ``python docs/_tools/pictures.py``. Standard library only.

A test draws them again and compares, so that a picture is changed here and never by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parent.parent / "pictures"

_PARAMETERS, _GRADIENTS, _OPTIMIZER = "#4c78a8", "#f58518", "#54a24b"
_BATCH, _EMPTY, _LINE, _TEXT = "#b279a2", "#f2f2f2", "#8a8a8a", "#222222"
_FORWARD, _BACKWARD = "#4c78a8", "#f58518"


class Canvas:
    """Collects shapes and writes them as one SVG file.

    Args:
        width: In pixels.
        height: In pixels.
        title: Read out by screen readers.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' font-family="sans-serif" font-size="12" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str, label: str = "") -> None:
        """A rectangle with an optional label in its middle."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{_LINE}"'
            ' stroke-width="0.7"/>'
        )
        if label:
            dark = fill in (_EMPTY, "#ffffff")
            self.text(x + width / 2, y + height / 2 + 4, label, anchor="middle", fill=_TEXT if dark else "#ffffff")

    def text(
        self, x: float, y: float, text: str, *, anchor: str = "start", fill: str = _TEXT, bold: bool = False
    ) -> None:
        """One line of text; ``y`` is its baseline."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}"{weight}>{escape(text)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A line with a head at its end, horizontal or vertical."""
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{_TEXT}" stroke-width="1.2"/>'
        )
        if x1 == x2:
            back = 6 if y2 > y1 else -6
            points = f"{x2:g},{y2:g} {x2 - 4:g},{y2 - back:g} {x2 + 4:g},{y2 - back:g}"
        else:
            back = 6 if x2 > x1 else -6
            points = f"{x2:g},{y2:g} {x2 - back:g},{y2 - 4:g} {x2 - back:g},{y2 + 4:g}"
        self._parts.append(f'<polygon points="{points}" fill="{_TEXT}"/>')

    def svg(self) -> str:
        """The file's content."""
        return "\n".join([*self._parts, "</svg>", ""])


def held(title: str, held_parts: Sequence[tuple[bool, bool, bool]], ranks: int = 4, group: int | None = None) -> str:
    """What each rank holds: one column a rank, one row for parameters, gradients and optimizer state.

    Args:
        title: Of the picture.
        held_parts: For each panel whether parameters, gradients and optimizer state are sharded.
        ranks: Columns of a panel.
        group: Ranks over which states are sharded; all of them if None.
    """
    group = group or ranks
    rows = (("parameters", _PARAMETERS, 26), ("gradients", _GRADIENTS, 26), ("optimizer state", _OPTIMIZER, 52))
    column, gap, left, top = 92, 14, 112, 62
    width = left + ranks * (column + gap) + 10
    height = top + sum(size for *_, size in rows) + 2 * 8 + 22
    picture = Canvas(width, height * len(held_parts), title)
    for panel, sharded in enumerate(held_parts):
        y0 = panel * height
        for rank in range(ranks):
            x = left + rank * (column + gap)
            picture.text(x + column / 2, y0 + 20, f"rank {rank}", anchor="middle", bold=True)
            picture.box(x, y0 + 28, column, 20, _BATCH, f"samples {rank}")
            y = y0 + top
            for (_, color, size), is_sharded in zip(rows, sharded, strict=True):
                if is_sharded:
                    part = column / group
                    picture.box(x, y, column, size, _EMPTY)
                    picture.box(x + part * (rank % group), y, part, size, color)
                else:
                    picture.box(x, y, column, size, color)
                y += size + 8
        y = y0 + top
        for name, _, size in rows:
            picture.text(8, y + size / 2 + 4, name)
            y += size + 8
        picture.text(8, y0 + 43, "batch")
    return picture.svg()


def tensor() -> str:
    """A pair of linear layers: column-wise, row-wise, one all-reduce."""
    picture = Canvas(640, 250, "A pair of linear layers over two tensor ranks")
    for rank in range(2):
        y = 40 + rank * 110
        picture.text(10, y + 38, f"rank {rank}", bold=True)
        picture.box(70, y, 60, 70, _BATCH, "x")
        picture.arrow(132, y + 35, 158, y + 35)
        for column in range(2):
            mine = column == rank
            picture.box(160 + 40 * column, y, 40, 70, _PARAMETERS if mine else _EMPTY, f"W1.{column}" if mine else "")
        picture.arrow(242, y + 35, 268, y + 35)
        picture.box(270, y + 15, 50, 40, _GRADIENTS, "gelu")
        picture.arrow(322, y + 35, 348, y + 35)
        for row in range(2):
            mine = row == rank
            picture.box(350, y + 35 * row, 80, 35, _PARAMETERS if mine else _EMPTY, f"W2.{row}" if mine else "")
        picture.arrow(432, y + 35, 488, y + 35)
        picture.box(560, y, 60, 70, _BATCH, "y")
        picture.arrow(522, y + 35, 558, y + 35)
    picture.text(200, 30, "columns of W1", anchor="middle")
    picture.text(390, 30, "rows of W2", anchor="middle")
    picture.text(100, 30, "same samples", anchor="middle")
    picture.box(490, 40, 32, 180, _OPTIMIZER)
    picture.text(506, 30, "sum (all-reduce)", anchor="middle")
    picture.text(70, 242, "Forward sends one all-reduce for the pair, backward another one at x.")
    return picture.svg()


def _timeline(order: Callable[[int, int, int], list[tuple[str, int]]], stages: int, micro: int) -> dict[int, list]:
    """Start of every computation if a forward takes one unit of time and a backward two."""
    lists = {stage: order(stage, stages, micro) for stage in range(stages)}
    free = dict.fromkeys(range(stages), 0)
    ends: dict[tuple[str, int, int], int] = {}
    drawn: dict[int, list] = {stage: [] for stage in range(stages)}
    while any(lists.values()):
        for stage, todo in lists.items():
            while todo:
                kind, index = todo[0]
                if kind == "F":
                    needs = [("F", stage - 1, index)] if stage else []
                else:
                    needs = [("B", stage + 1, index)] if stage < stages - 1 else [("F", stage, index)]
                if any(need not in ends for need in needs):
                    break
                start = max([free[stage], *(ends[need] for need in needs)])
                length = 1 if kind == "F" else 2
                ends[kind, stage, index] = free[stage] = start + length
                drawn[stage].append((kind, index, start, length))
                todo.pop(0)
    return drawn


def _gpipe(stage: int, stages: int, micro: int) -> list[tuple[str, int]]:
    return [("F", index) for index in range(micro)] + [("B", index) for index in range(micro)]


def _one_f_one_b(stage: int, stages: int, micro: int) -> list[tuple[str, int]]:
    warm = min(stages - stage, micro)
    found = [("F", index) for index in range(warm)]
    for index in range(micro):
        found.append(("B", index))
        if index + warm < micro:
            found.append(("F", index + warm))
    return found


def pipeline() -> str:
    """GPipe and 1F1B on four ranks with eight micro-batches."""
    unit, row, left, stages, micro = 20, 24, 70, 4, 8
    length = 3 * (micro + stages - 1)
    panels = (("GPipe", _gpipe), ("1F1B", _one_f_one_b))
    panel_height = row * stages + 50
    picture = Canvas(left + unit * length + 12, panel_height * len(panels) + 20, "GPipe and 1F1B over four ranks")
    for panel, (name, order) in enumerate(panels):
        y0 = panel * panel_height
        picture.text(10, y0 + 22, f"{name}: {stages} ranks, {micro} micro-batches", bold=True)
        for stage, drawn in _timeline(order, stages, micro).items():
            y = y0 + 32 + stage * row
            picture.text(10, y + 16, f"rank {stage}")
            picture.box(left, y, unit * length, row - 3, _EMPTY)
            for kind, index, start, size in drawn:
                color = _FORWARD if kind == "F" else _BACKWARD
                picture.box(left + unit * start, y, unit * size, row - 3, color, str(index))
    y = panel_height * len(panels) + 2
    picture.box(left, y - 6, 14, 12, _FORWARD)
    picture.text(left + 20, y + 4, "forward")
    picture.box(left + 90, y - 6, 14, 12, _BACKWARD)
    picture.text(left + 110, y + 4, "backward")
    picture.box(left + 200, y - 6, 14, 12, _EMPTY)
    picture.text(left + 220, y + 4, "idle: 3 of 11 micro-batch times, (p - 1) / (m + p - 1)")
    return picture.svg()


def mesh() -> str:
    """Eight ranks as 2 x 2 x 2: pipeline, data, tensor."""
    picture = Canvas(640, 250, "Eight ranks: two stages, two data replicas, two tensor ranks")
    for stage in range(2):
        x0 = 90 + stage * 280
        picture.text(x0 + 115, 24, f"pipeline stage {stage}", anchor="middle", bold=True)
        for replica in range(2):
            y = 40 + replica * 90
            picture.box(x0 - 8, y - 6, 246, 72, "#ffffff")
            for rank in range(2):
                number = 4 * stage + 2 * replica + rank
                picture.box(x0 + rank * 120, y, 110, 60, (_PARAMETERS, _OPTIMIZER)[rank], f"rank {number}")
        if stage == 0:
            for replica in range(2):
                picture.arrow(x0 + 242, 70 + replica * 90, x0 + 270, 70 + replica * 90)
    for replica in range(2):
        picture.text(10, 74 + replica * 90, f"samples {replica}")
    picture.text(
        10, 226, "One frame: a tensor group, which shards every layer of its stage. Vertical: the data axis, over which"
    )
    picture.text(10, 242, "gradients are averaged. Arrows: activations of micro-batches forward, their gradients back.")
    return picture.svg()


def context() -> str:
    """Two context ranks: tokens outside of attention, heads inside."""
    picture = Canvas(640, 250, "Two context ranks: half of the tokens each, and half of the heads in attention")
    for rank in range(2):
        y = 40 + rank * 110
        picture.text(10, y + 38, f"rank {rank}", bold=True)
        for x0, fill, label in ((80, _BATCH, "x"), (500, _BATCH, "y")):
            for part in range(2):
                mine = part == rank
                picture.box(x0 + 40 * part, y, 40, 70, fill if mine else _EMPTY, f"{label}.{part}" if mine else "")
        for head in range(2):
            mine = head == rank
            picture.box(290, y + 35 * head, 90, 35, _PARAMETERS if mine else _EMPTY, f"heads {head}" if mine else "")
        for x1, x2 in ((162, 208), (242, 288), (382, 418), (452, 498)):
            picture.arrow(x1, y + 35, x2, y + 35)
    for x in (210, 420):
        picture.box(x, 40, 32, 180, _OPTIMIZER)
        picture.text(x + 16, 30, "all-to-all", anchor="middle")
    picture.text(120, 30, "tokens of a part", anchor="middle")
    picture.text(335, 30, "attention", anchor="middle")
    picture.text(540, 30, "tokens of a part", anchor="middle")
    picture.text(80, 242, "Every rank has its heads of all tokens, and the mask as the module made it.")
    return picture.svg()


def expert() -> str:
    """Two expert ranks: tokens to the ranks of their experts, and results back."""
    picture = Canvas(640, 250, "Two expert ranks: each has its own samples and half of the experts")
    for rank in range(2):
        y = 40 + rank * 110
        picture.text(10, y + 38, f"rank {rank}", bold=True)
        for x0, label in ((80, "tokens"), (520, "results")):
            picture.box(x0, y, 80, 70, _BATCH, f"{label} {rank}")
        for index in range(4):
            mine = index // 2 == rank
            x, row = 290 + 60 * (index % 2), y + 35 * (index // 2)
            picture.box(x, row, 60, 35, _PARAMETERS if mine else _EMPTY, f"expert {index}" if mine else "")
        for x1, x2 in ((162, 208), (242, 288), (412, 438), (472, 518)):
            picture.arrow(x1, y + 35, x2, y + 35)
    for x in (210, 440):
        picture.box(x, 40, 32, 180, _OPTIMIZER)
        picture.text(x + 16, 30, "all-to-all", anchor="middle")
    picture.text(350, 30, "experts", anchor="middle")
    picture.text(80, 242, "Tokens go where the router sends them: as many as it does, a different number each step.")
    return picture.svg()


def local_sgd() -> str:
    """Two islands of two ranks."""
    picture = Canvas(640, 170, "Two islands of two ranks, whose parameters are averaged every few steps")
    for island in range(2):
        x0 = 20 + island * 340
        picture.text(x0 + 130, 24, f"island {island}", anchor="middle", bold=True)
        picture.box(x0, 34, 260, 80, "#ffffff")
        for rank in range(2):
            picture.box(x0 + 12 + rank * 142, 46, 94, 56, _PARAMETERS, f"rank {2 * island + rank}")
        picture.arrow(x0 + 108, 66, x0 + 152, 66)
        picture.arrow(x0 + 152, 84, x0 + 108, 84)
    picture.arrow(282, 66, 358, 66)
    picture.arrow(358, 84, 282, 84)
    picture.text(20, 138, "Inside an island: gradients, every step (or whatever its strategy sends).")
    picture.text(20, 156, "Between islands: parameters, every sync_every steps.")
    return picture.svg()


def outer_streams() -> str:
    """Two fragments in turns."""
    picture = Canvas(640, 170, "Two fragments in turns over eight steps, each two steps on its way")
    for step in range(8):
        picture.box(90 + step * 66, 24, 60, 30, "#ffffff", f"step {step + 1}")
    for fragment, starts in enumerate(((1, 5), (3,))):
        y = 64 + fragment * 36
        picture.text(10, y + 20, f"fragment {fragment}")
        for start in starts:
            picture.box(90 + (start + 1) * 66, y, 126, 28, (_PARAMETERS, _OPTIMIZER)[fragment], "on its way")
    picture.text(10, 146, "sync_every=4, fragments=2, fragment_sync_delay=2: a difference is sent behind its step and")
    picture.text(10, 162, "taken in two steps later, while islands train on.")
    return picture.svg()


def parameter_server() -> str:
    """Two ranks that work and serve: who sends what when."""
    picture = Canvas(680, 330, "Two ranks, each a worker and a server: what travels when, synchronous and asynchronous")
    lines = {"worker 0": 60, "server 0": 90, "server 1": 120, "worker 1": 150}

    def frame(top: int, title: str) -> None:
        picture.text(10, top + 30, title, bold=True)
        for name, y in lines.items():
            picture.text(10, top + y + 4, name)
            picture.arrow(76, top + y, 660, top + y)

    frame(0, "synchronous: one update of the mean gradient a step")
    for start in (90, 370):
        for name in ("worker 0", "worker 1"):
            picture.box(start, lines[name] - 10, 120, 20, _PARAMETERS, "step")
        for name in ("server 0", "server 1"):
            for source in ("worker 0", "worker 1"):
                picture.arrow(start + 122, lines[source], start + 158, lines[name])
                picture.arrow(start + 200, lines[name], start + 236, lines[source])
            picture.box(start + 160, lines[name] - 10, 38, 20, _OPTIMIZER)
    frame(150, "asynchronous: each worker's gradients are an update")
    for worker, length, starts in (("worker 0", 70, (90, 240, 390)), ("worker 1", 180, (90, 350))):
        for start in starts:
            y = 150 + lines[worker]
            picture.box(start, y - 10, length, 20, _PARAMETERS, "step")
            for name in ("server 0", "server 1"):
                at = start + length + 30
                picture.box(at, 150 + lines[name] - 10, 18, 20, _OPTIMIZER)
                picture.arrow(start + length + 2, y, at, 150 + lines[name])
                picture.arrow(at + 20, 150 + lines[name], at + 46, y)
    picture.text(560, 210, "waits: max_staleness")
    return picture.svg()


def dedicated_servers() -> str:
    """Two workers and a rank that only serves: who is the world, and who sends what when."""
    picture = Canvas(680, 300, "Two workers and a rank that only serves: what travels when, in both forms")
    lines = {"worker 0": 60, "worker 1": 90, "server": 124}

    def frame(top: int, title: str) -> None:
        picture.text(10, top + 30, title, bold=True)
        for name, y in lines.items():
            picture.text(10, top + y + 4, name)
            picture.arrow(76, top + y, 660, top + y)

    frame(0, "synchronous: workers average, one of them sends the mean, all get new values")
    for start in (90, 370):
        for name in ("worker 0", "worker 1"):
            picture.box(start, lines[name] - 10, 90, 20, _PARAMETERS, "step")
            picture.box(start + 92, lines[name] - 10, 50, 20, _GRADIENTS, "mean")
            picture.arrow(start + 202, lines["server"], start + 236, lines[name])
        picture.arrow(start + 144, lines["worker 0"], start + 164, lines["server"])
        picture.box(start + 164, lines["server"] - 10, 38, 20, _OPTIMIZER)
    frame(140, "asynchronous: each worker's gradients are an update")
    for worker, length, starts in (("worker 0", 70, (90, 240, 390)), ("worker 1", 180, (90, 350))):
        for start in starts:
            y, server = 140 + lines[worker], 140 + lines["server"]
            picture.box(start, y - 10, length, 20, _PARAMETERS, "step")
            picture.box(start + length + 30, server - 10, 18, 20, _OPTIMIZER)
            picture.arrow(start + length + 2, y, start + length + 30, server)
            picture.arrow(start + length + 50, server, start + length + 76, y)
    picture.text(
        10, 292, "For torch, Lightning and user code both workers are the world. The server is one of its own."
    )
    return picture.svg()


def data_parallel() -> str:
    """Two replicas in threads of one process."""
    picture = Canvas(640, 190, "Two replicas in threads of one process, and the optimizer on the first device")
    picture.box(20, 34, 600, 100, "#ffffff")
    picture.text(320, 24, "one process", anchor="middle", bold=True)
    picture.box(36, 52, 110, 62, "#ffffff", "batch")
    for replica in range(2):
        y = 44 + replica * 44
        picture.arrow(148, 82, 206, y + 18)
        picture.box(210, y, 150, 36, _PARAMETERS, f"thread {replica}, replica {replica}")
        picture.arrow(362, y + 18, 420, 82)
    picture.box(424, 52, 180, 62, _OPTIMIZER, "loss, backward, optimizer")
    picture.text(20, 158, "Every step: the batch is cut, replicas take the parameters, losses come together.")
    picture.text(20, 176, "Gradients of all replicas add up in the parameters of the first device.")
    return picture.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "ddp.svg": lambda: held("What each of four ranks holds under data parallelism", [(False, False, False)]),
    "zero.svg": lambda: held(
        "What each of four ranks holds under ZeRO-1 (above) and ZeRO-2 (below)",
        [(False, False, True), (False, True, True)],
    ),
    "fsdp.svg": lambda: held("What each of four ranks holds under ZeRO-3 and FSDP", [(True, True, True)]),
    "hsdp.svg": lambda: held(
        "What each of four ranks holds under HSDP, two nodes of two", [(True, True, True)], group=2
    ),
    "tensor.svg": tensor,
    "context.svg": context,
    "expert.svg": expert,
    "pipeline.svg": pipeline,
    "mesh.svg": mesh,
    "local_sgd.svg": local_sgd,
    "outer_streams.svg": outer_streams,
    "parameter_server.svg": parameter_server,
    "dedicated_servers.svg": dedicated_servers,
    "data_parallel.svg": data_parallel,
}


def main() -> None:
    """Write every picture."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())


if __name__ == "__main__":
    main()
