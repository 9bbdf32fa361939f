"""The experiment that confirms which weights make each head: operators are repeated with changed weights."""
