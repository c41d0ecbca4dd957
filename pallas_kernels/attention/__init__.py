"""Causal attention of each token to its own document, in rows that hold several documents."""

from pallas_kernels.attention.api import document_attention as document_attention
from pallas_kernels.attention.bounds import Bounds as Bounds
from pallas_kernels.attention.bounds import document_bounds as document_bounds
from pallas_kernels.attention.config import AttentionConfig as AttentionConfig
from pallas_kernels.attention.config import ForwardConfig as ForwardConfig
from pallas_kernels.attention.config import KeysConfig as KeysConfig
from pallas_kernels.attention.config import QueriesConfig as QueriesConfig
