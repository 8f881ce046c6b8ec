"""What a training needs, counted from specs before anything is allocated, and how it is laid over devices."""
