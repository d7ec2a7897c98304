"""What `policy.model_name` settles: between the files of Hugging Face models and the architecture of a recipe."""
