"""The attention sites of a model, and the tap that accumulates their statistics.

The files in the order in which a search calls them:

    find             find_sites: the example, several models, qkeel's own modules; `qkeel.watch` begins one file below
    site_search      when a module is about to call attention, finds its sites, in a pass of the program's or of qkeel's
    repeated_layers  a module that computes what a known one computes is not read again
    module_copy      otherwise a copy of it runs alone, on a part of its arguments: to be read, and again with other weights
    trace            the calls of that run, and the sites that they belong to
    rows, graph      the rows of weights behind q and k, from gradients and autograd's graph; norms: the gains of norms
    verify           runs with other weights, which confirm the rows of each head
    site             what is known then: AttentionSite, HeadSlice, Sites

`tap` and `observed_pass` read the statistics of the same calls in later passes.
"""

from qkeel.capture.calls import UnrecognizedAttention
from qkeel.capture.described import Reading
from qkeel.sites.description import describe
from qkeel.sites.find import find_sites
from qkeel.sites.site import AttentionSite, HeadSlice, QKProduct, Sites
from qkeel.sites.tap import Tap

__all__ = [
    "AttentionSite",
    "HeadSlice",
    "QKProduct",
    "UnrecognizedAttention",
    "Reading",
    "Sites",
    "Tap",
    "describe",
    "find_sites",
]
