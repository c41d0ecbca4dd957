"""The shapes that the benchmarks measure."""

type Shape = tuple[int, ...]

# Tokens x hidden size: the widths of Llama (2048 to 16384), a narrow one, gpt-oss's 2880, which is
# no multiple of 128, and two shapes that are too small to fill a card.
NORM: tuple[Shape, ...] = (
    (32768, 2048),
    (16384, 4096),
    (8192, 8192),
    (65536, 1024),
    (4096, 16384),
    (16384, 2880),
    (16384, 5120),
    (256, 4096),
    (1024, 2048),
)

# Tokens x intermediate size of Llama 1B, 8B and 70B.
SWIGLU: tuple[Shape, ...] = ((16384, 8192), (16384, 14336), (4096, 28672))

# Tokens x hidden size x vocabulary of Llama 3.1 8B, 3.2 1B and 3.3 70B, Llama 2, Qwen 2.5 and
# Gemma 2.
LOSS: tuple[Shape, ...] = (
    (8192, 4096, 128256),
    (16384, 2048, 128256),
    (32768, 4096, 128256),
    (8192, 4096, 32000),
    (8192, 3584, 152064),
    (8192, 2304, 256000),
    (4096, 8192, 128256),
)


def label(shape: Shape) -> str:
    """The shape as tables show it, such as `16384x4096`."""
    return "x".join(map(str, shape))


def parse(text: str) -> Shape:
    """The shape that `label` turned into `text`."""
    return tuple(int(size) for size in text.split("x"))
