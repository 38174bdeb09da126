"""What does the program itself use? The loop that survives, in every process of the training."""
