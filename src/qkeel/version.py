"""The version of qkeel, which is available even in a checkout that is not installed."""

VERSION = "0.1.0"
