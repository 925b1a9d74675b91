"""Production: which groups are generated when, the pause and the resume, and the batches that are taken."""
