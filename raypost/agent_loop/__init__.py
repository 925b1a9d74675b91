"""Agent loops: how a group's trajectories are made and judged. Each implements `types.generation.AgentLoop`."""
