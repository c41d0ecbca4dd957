"""The error for data that cannot be used."""


class DataError(ValueError):
    """Data or a tokenizer that cannot be used.

    The message is one line that names the file, the line in the file if it has lines, and the
    remedy.
    """

    def __init__(self, message: str):
        # It may quote the messages of other libraries, which have several lines.
        super().__init__(" ".join(message.split("\n")))
