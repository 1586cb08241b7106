// Dark or light: the system's setting, or the user's choice on this page.

import { useState } from "preact/hooks";

const THEMES = ["system", "dark", "light"] as const;
type Theme = (typeof THEMES)[number];

const KEY = "fulcrum-theme";

function readTheme(): Theme {
  const stored = localStorage.getItem(KEY);
  return THEMES.find((theme) => theme === stored) ?? "system";
}

export function applyTheme(theme: Theme = readTheme()): void {
  if (theme === "system") delete document.documentElement.dataset["theme"];
  else document.documentElement.dataset["theme"] = theme;
}

export function ThemeButton() {
  const [theme, setTheme] = useState(readTheme);
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]!;
  const choose = () => {
    localStorage.setItem(KEY, next);
    applyTheme(next);
    setTheme(next);
  };
  return (
    <button type="button" class="theme" onClick={choose} title={`Change to ${next}`}>
      Theme: {theme}
    </button>
  );
}
