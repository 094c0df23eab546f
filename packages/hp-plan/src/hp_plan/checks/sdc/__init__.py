"""Silent data corruption without a framework: what was found, who computes whose samples again, and the vote."""
