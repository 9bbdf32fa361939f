"""The version of qkeel, for whatever records it: also of a checkout that nobody has installed."""

VERSION = "0.1.0"
