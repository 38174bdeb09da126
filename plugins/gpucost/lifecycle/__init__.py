"""What happens next to this job? The steps from wanting to done, over everything that gets in between."""
