"""Recipe: ResNet-18 on small photographs."""
