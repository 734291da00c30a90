#compdef interlock
# Completion of interlock for zsh: eval "$(interlock completion zsh)", or this text as the file _interlock in $fpath
_interlock() {
  local command=${(Q)words[1]} line
  local -a lines values shown
  command=${command/#\~\//$HOME/}
  lines=("${(@f)$("$command" __complete zsh "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)}")
  case $lines[1] in
    files) _files ;;
    command)
      while [[ $words[1] != -- ]]; do shift words; ((CURRENT--)); done
      shift words
      ((CURRENT--))
      _normal
      ;;
    *)
      for line in "${(@)lines[2,-1]}"; do
        values+=("${line%%$'\t'*}")
        shown+=("${line/$'\t'/  -- }")
      done
      ((${#values})) && compadd -l -d shown -- "${(@)values}"
      ;;
  esac
}
if [[ $funcstack[1] == _interlock ]]; then _interlock "$@"; else compdef _interlock interlock; fi
