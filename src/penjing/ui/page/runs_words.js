// The words of the tab of runs.

export const words = {
  en: { runsOf: "Runs in {folder}" },
  zh: { runsOf: "{folder} 中的运行" },
};
