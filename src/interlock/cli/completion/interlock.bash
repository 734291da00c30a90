# Completion of interlock for bash: eval "$(interlock completion bash)"
_interlock() {
  local first line command="${1/#\~\//$HOME/}"
  COMPREPLY=()
  while IFS= read -r line; do
    if [ -z "$first" ]; then first=$line; else COMPREPLY+=("$line"); fi
  done < <("$command" __complete bash "$COMP_LINE" "$COMP_POINT" "$COMP_WORDBREAKS" 2>/dev/null)
  case $first in
    files) compopt -o default 2>/dev/null ;;
    command) _interlock_command ;;
  esac
}
_interlock_command() { # behind `interlock run NAME --`, the words of another command
  local at=1 line
  while [ "${COMP_WORDS[at]}" != -- ]; do at=$((at + 1)); done
  at=$((at + 1))
  if declare -F _comp_command_offset >/dev/null; then
    _comp_command_offset "$at"
  elif declare -F _command_offset >/dev/null; then
    _command_offset "$at"
  elif [ "$COMP_CWORD" -eq "$at" ] && [[ ${COMP_WORDS[at]} != */* ]]; then
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -c -- "${COMP_WORDS[at]}")
  else
    compopt -o default 2>/dev/null
  fi
}
complete -F _interlock interlock
