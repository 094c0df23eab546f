"""Operations, whatever the framework: how a call is planned."""
