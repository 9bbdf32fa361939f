"""SEE: who watches, and rules on what was recorded that say when to worry."""
