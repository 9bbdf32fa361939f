def page(files):
    return ""
