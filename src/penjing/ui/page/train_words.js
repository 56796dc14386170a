// The words of the tab of training.

export const words = {
  en: {
    trainLoading: "Loading the settings: the first time takes some seconds…",
    trainRecipe: "Recipe",
    trainRecipes: "Recipes",
    trainAsRun: "As in a run",
    trainSearch: "Search settings",
    trainOften: "Most used",
    trainRun: "run",
    trainUndo: "Back to the recipe’s {name}",
    trainStart: "Start training",
    trainReset: "Undo all changes",
    trainInto: "Trains into {out}. The run goes on when this page or its server ends.",
  },
  zh: {
    trainLoading: "正在加载设置，第一次需要几秒钟…",
    trainRecipe: "配方",
    trainRecipes: "配方",
    trainAsRun: "沿用某个运行",
    trainSearch: "搜索设置",
    trainOften: "常用",
    trainRun: "运行",
    trainUndo: "恢复配方中的 {name}",
    trainStart: "开始训练",
    trainReset: "撤销全部改动",
    trainInto: "训练结果写入 {out}。关闭页面或其服务器后，训练照常进行。",
  },
};
