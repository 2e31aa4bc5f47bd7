def page(e): return ""
def fragment(e): return ""
