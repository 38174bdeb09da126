"""Which instance is taken back, when, and who is told before?"""
