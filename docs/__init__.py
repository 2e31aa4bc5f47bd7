"""The pages of the site, and what draws its pictures."""
