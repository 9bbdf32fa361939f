"""The claims of the literature as code: which study tests each, by which rule, and the page of what was found."""
