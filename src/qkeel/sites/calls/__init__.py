"""An attention call as it was seen, in one form: its layout of heads, its mask, its arguments."""
