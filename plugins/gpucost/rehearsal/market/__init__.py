"""What is sold, at which price, how much of it, and when?"""
