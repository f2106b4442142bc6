"""Draws architecture.svg beside this file:  python docs/pictures/architecture.py

A test compares the two. Plain SVG: no library, no font to fetch.
"""

from pathlib import Path

INK, FAINT, PAPER = "#1f2933", "#5f6c7b", "#ffffff"
STREAM, MANAGER, PROCESS, TABLE = "#fde7c7", "#d6e6f9", "#e2f2dd", "#eadcf5"
FONT = "font-family='DejaVu Sans, Helvetica, Arial, sans-serif'"
SHARDS, ROW = 4, 46
TOP = 76


class Drawing:
    """Shapes in the order in which they are drawn."""

    def __init__(self):
        self.shapes = []

    def box(self, x, y, width, height, fill, *, dashed=False):
        dash = " stroke-dasharray='5 4'" if dashed else ""
        self.shapes.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='6' fill='{fill}'"
            f" stroke='{FAINT}'{dash}/>"
        )

    def text(self, x, y, words, *, size=13, bold=False, middle=True, fill=INK):
        weight = " font-weight='600'" if bold else ""
        anchor = " text-anchor='middle'" if middle else ""
        self.shapes.append(
            f"<text x='{x}' y='{y}' font-size='{size}' fill='{fill}'{weight}{anchor}>{words}</text>"
        )

    def arrow(self, x1, y1, x2, y2, *, both=False):
        start = " marker-start='url(#tip)'" if both else ""
        self.shapes.append(
            f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{FAINT}'"
            f" marker-end='url(#tip)'{start}/>"
        )

    def svg(self, width, height):
        tip = (
            "<marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7'"
            f" orient='auto-start-reverse'><path d='M0 0 L8 4 L0 8 z' fill='{FAINT}'/></marker>"
        )
        head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' {FONT}"
            " role='img'>\n<title>A stream's shards are read by one process a lease on two"
            " machines; managers share the leases through a DynamoDB table</title>\n"
            f"<defs>{tip}</defs>\n<rect width='{width}' height='{height}' fill='{PAPER}'/>\n"
        )
        return head + "\n".join(self.shapes) + "\n</svg>\n"


def draw():
    """The picture, as text."""
    art = Drawing()
    art.text(104, 34, "Kinesis stream", size=15, bold=True)
    art.box(20, 48, 168, 2 * TOP + SHARDS * ROW + 62, PAPER)
    art.text(440, 34, "each machine: kclrun --config app.yaml", size=15, bold=True)
    art.text(760, 34, "your output", size=15, bold=True)
    for machine in range(2):
        draw_machine(art, machine, 48 + machine * (TOP + 2 * ROW + 31))
    art.box(264, 466, 352, 56, TABLE)
    art.text(440, 489, "DynamoDB lease table", bold=True)
    art.text(440, 508, "a row a shard, in the schema of the Java KCL 2.x", size=12)
    art.box(660, 466, 208, 56, PAPER, dashed=True)
    art.text(764, 489, "Java KCL 2.x workers", bold=True)
    art.text(764, 508, "may share the table", size=12)
    art.arrow(616, 494, 660, 494, both=True)
    art.text(20, 489, "There is no leader, and no", middle=False, size=12, fill=FAINT)
    art.text(20, 507, "port between the machines.", middle=False, size=12, fill=FAINT)
    return art.svg(888, 542)


def draw_machine(art, machine, top):
    """One machine: its manager above, a process for each of its two leases below."""
    height = TOP + 2 * ROW + 11
    art.box(244, top, 392, height, PAPER, dashed=True)
    art.box(264, top + 14, 352, 44, MANAGER)
    art.text(440, top + 33, "manager: the lease manager (pure core)", bold=True)
    art.text(440, top + 50, "takes, hands off and offers leases; starts processes", size=12)
    for place in range(2):
        shard = 2 * machine + place
        y = top + TOP + place * ROW
        art.box(36, y, 136, 36, STREAM)
        art.text(104, y + 23, f"shard {shard}")
        art.box(264, y, 352, 36, PROCESS)
        art.text(440, y + 16, f"lease process of shard {shard}", bold=True)
        art.text(440, y + 31, "fetch → your RecordProcessor → checkpoint", size=12)
        art.arrow(172, y + 18, 264, y + 18)
        art.arrow(616, y + 18, 690, y + 18)
        art.box(690, y, 140, 36, PAPER)
        art.text(760, y + 23, "rows of that shard", size=12)
    if machine == 1:
        art.arrow(440, top + height, 440, 466, both=True)
        art.text(450, 457, "renewals, checkpoints, offers", middle=False, size=12, fill=FAINT)


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
