"""The sources of the site: pages of the repository as they stand, and pages made from code. ``scripts/docs`` builds."""
