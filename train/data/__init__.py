"""Training batches, addressed by step number.

A batch is a pure function of (seed, step). So a run that resumes needs only the step number to
continue with the same batches, and any process can build any rows of any batch.

- `corpus`, `synthetic`: data that every machine has.
- `files`, `chat`, `tokenizer`, `cache`, `sources`: text of your own, tokenized once into a cache.
- `errors`, `records`, `progress`: errors that name a remedy, the fields of records, and progress on
  the terminal.
- `held_out`: which documents are held out.
- `folder`, `index`, `lock`, `regular`: guards of the cache against links, damaged files, other
  processes, and files that are no regular files.
- `packing`, `mixture`: rows and batches of the tokens.
- `pairs`: rows and batches of preferences.
- `prefetch`: batches made ahead of the step.
"""

from train.data.corpus import Corpus, read_corpus, stdlib_corpus
from train.data.errors import DataError
from train.data.mixture import MixtureDataset
from train.data.packing import IGNORED, Batch, PackedDataset, predicted_bytes
from train.data.pairs import PairDataset
from train.data.prefetch import prefetch, timed
from train.data.sources import (
    Dataset,
    check_effects,
    load_tokenizer,
    open_files,
    open_preferences,
    tell_of_cut_records,
)
from train.data.synthetic import SyntheticDataset
from train.data.tokenizer import (
    BOS,
    BYTE_VOCAB_SIZE,
    BYTES,
    EOS,
    HuggingFaceTokenizer,
    Tokenizer,
    decode_after,
    start_of_document,
)

__all__ = [
    "BOS",
    "BYTES",
    "BYTE_VOCAB_SIZE",
    "EOS",
    "IGNORED",
    "Batch",
    "Corpus",
    "DataError",
    "Dataset",
    "HuggingFaceTokenizer",
    "MixtureDataset",
    "PackedDataset",
    "PairDataset",
    "SyntheticDataset",
    "Tokenizer",
    "check_effects",
    "decode_after",
    "load_tokenizer",
    "open_files",
    "open_preferences",
    "predicted_bytes",
    "prefetch",
    "read_corpus",
    "start_of_document",
    "stdlib_corpus",
    "tell_of_cut_records",
    "timed",
]
