"""XSAKE inside other libraries' layers: one module per library, imported only by who uses it."""
