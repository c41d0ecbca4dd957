"""What is wrong with the data, in one line for the person who gave it."""


class DataError(ValueError):
    """Data or a tokenizer that cannot be trained on.

    The message is one line that names the file, the line where there is one, and the remedy.
    """

    def __init__(self, message: str):
        # Other libraries' messages, which may be part of it, have several lines.
        super().__init__(" ".join(message.split("\n")))
